"""One HTML file about a data set. It needs no network and no JavaScript, and holds row text only on request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_checks.presentation.words import ORDER, account, show_number, show_threshold, what_to_say

TEMPLATE = Path(__file__).with_name("page.html")
MAX_TEXT_CHARACTERS = 600
# Characters that XML and HTML cannot hold, lone surrogates among them. Tab and newline stay.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
WIDTH, HEIGHT = 360, 80


def html_page(report: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page.

    Args:
        report: what report.json holds.
        samples: rows `{where, fate, numbers{name: value}, texts{part: text} or None}` for the table of samples; their
            texts stand in closed sections. None for a text that may not be shown.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": show_number, "printable": printable}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    checks = sorted(report["checks"], key=lambda check: ORDER.index(check["verdict"]))
    return template.render(
        report=report,
        checks=[{**check, "limit": show_threshold(check), "told": what_to_say(check)} for check in checks],
        account=list(account(report)),
        histograms=[bars(name, shape) for name, shape in (report.get("histograms") or {}).items()],
        sources=_sources(report.get("by_source") or []),
        samples=samples,
    )


def printable(text: str) -> str:
    """Return a text that a page can hold: cut, and with a mark for each character that a page cannot show."""
    cut = text[:MAX_TEXT_CHARACTERS] + ("…" if len(text) > MAX_TEXT_CHARACTERS else "")
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", cut)


def bars(name: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return a histogram as bars of an SVG picture: x, y, width and height each, and what they stand for."""
    counts, start, width = shape["counts"], shape["start"], shape["width"]
    highest = max(counts, default=0) or 1
    step = WIDTH / max(len(counts), 1)
    drawn = [
        {
            "x": round(index * step, 2),
            "y": round(HEIGHT * (1 - count / highest), 2),
            "width": round(max(step - 1, 0.5), 2),
            "height": round(HEIGHT * count / highest, 2),
            "title": f"{start + index * width:.4g} to {start + (index + 1) * width:.4g}: {count:,}",
        }
        for index, count in enumerate(counts)
    ]
    low, high = show_number(float(start)), show_number(float(start + len(counts) * width))
    return {"name": name, "bars": drawn, "low": low, "high": high, "rows": sum(counts), "size": (WIDTH, HEIGHT)}


def _sources(by_source: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a source with its numbers by name."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in by_source:
        rows.setdefault(entry["source"], {})[entry["metric"]] = entry["value"]
    return [{"source": source, "numbers": numbers} for source, numbers in sorted(rows.items())]
