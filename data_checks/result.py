"""What a check leaves: an account of every row, tables on disk, and numbers. No row text is held here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_checks.detection import FormatEvidence
    from data_checks.tokens import Limits

Numbers = dict[str, float | int | None]
"""Name -> number; None: it could not be known, and `CheckedData.skipped` says why."""

INPUT_TABLES = ("preferences", "feedback", "rl_prompts", "eval_prompts", "stepwise")
"""The kinds of input, in the order of reports."""


@dataclass
class Defects:
    """How often a defect was found, whatever a row was counted under."""

    rows: int = 0
    transcripts: int = 0
    """Sides (chosen or rejected) that have it; 0 for a defect of the whole row."""
    examples: list[str] = field(default_factory=list)
    """The first places, as file:row."""
    detail: str = ""
    """All that was found in the first of these; what a row is counted under may be another of its defects."""


@dataclass
class Ledger:
    """The account of one kind of input: examples == kept + all quarantined + all dropped."""

    rows: int
    """Rows in the files; each became one example or more."""
    examples: int
    kept: int
    quarantined: dict[str, int]
    """Reason -> examples counted under it."""
    dropped: dict[str, int]
    """Policy -> examples left out by it."""
    defects: dict[str, Defects]

    def __post_init__(self) -> None:
        accounted = self.kept + self.num_quarantined + self.num_dropped
        assert self.examples == accounted, f"a row is lost: {self}"
        assert self.examples >= self.rows, f"a row became no example: {self}"

    @property
    def num_quarantined(self) -> int:
        return sum(self.quarantined.values())

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def quarantined_fraction(self) -> float:
        return self.num_quarantined / self.examples if self.examples else 0.0


@dataclass
class CheckedData:
    """What is used, what is not, and where it lies."""

    tables: dict[str, Path]
    """Output tables (docs/stages.md): `train_pairs`, `validation_pairs`, `quarantine`, … -> Parquet file."""
    features: dict[str, Path]
    """Kind of input -> Parquet file with one row of numbers an example, fate and split included."""
    ledgers: dict[str, Ledger]
    """Of each kind of input that was read from files."""
    num_rows: dict[str, int]
    """Output table -> rows in it."""
    formats: list[FormatEvidence]
    limits: Limits | None
    """None where no tokenizer was given."""
    fingerprint: str
    whole: Numbers = field(default_factory=dict)
    """Numbers that need all rows: `num_duplicates`, `num_conflicts`, `num_cycles`, near-duplicates, contamination, …"""
    skipped: dict[str, str] = field(default_factory=dict)
    """Number -> why it could not be measured, for checks that say `skipped`."""

    def ledger(self, table: str) -> Ledger:
        return self.ledgers.get(table) or Ledger(0, 0, 0, {}, {}, {})
