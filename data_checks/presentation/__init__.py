"""What people see of a check: a table, a page, a card. No row text unless it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from data_checks.presentation.card import dataset_card
from data_checks.presentation.page import html_page
from data_checks.presentation.table import check_lines
from training_core.protocol.atomic import write_json, write_text

if TYPE_CHECKING:
    from data_checks.check import Outcome

__all__ = ["check_lines", "dataset_card", "html_page", "write_report"]


def write_report(outcome: Outcome, folder: Path) -> None:
    """Write everything that a check says of a data set into a new folder; docs/stages.md lists the files."""
    folder.mkdir()
    write_json(folder / "report.json", outcome.report)
    write_json(folder / "great_expectations.json", outcome.results)
    write_text(folder / "DATASET_CARD.md", dataset_card(outcome.report))
    write_text(folder / "report.html", html_page(outcome.report))
