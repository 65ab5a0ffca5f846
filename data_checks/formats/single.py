"""Single rows parsed by the name of their format."""

from __future__ import annotations

from data_checks.formats.base import Options, Result, RowError
from data_checks.formats.registry import FORMATS
from data_checks.rows import RawRow


def parse_pair(row: RawRow, format_name: str, source: str) -> Result:
    """Return the first pair that a readable row holds, or the finding that says why it holds none.

    Args:
        row: with a value.
        format_name: of a format of pairs.
        source: name of the data where the row has no `source` text.
    """
    return _first(row, format_name, Options(source=source))


def parse_feedback(row: RawRow, source: str, rating_threshold: float | None) -> Result:
    """Return the judged answer that a readable row holds, or the finding that says why it holds none.

    Args:
        row: with a value.
        source: name of the data where the row has no `source` text.
        rating_threshold: ratings from here on are good, for rows without another judgement; null: not said.
    """
    return _first(row, "feedback", Options(source=source, rating_threshold=rating_threshold))


def parse_prompt(row: RawRow) -> Result:
    """Return the prompt that a readable row holds, or the finding that says why it holds none."""
    return _first(row, "prompts", Options(source=row.file))


def _first(row: RawRow, format_name: str, options: Options) -> Result:
    try:
        return FORMATS[format_name].convert(row, options)[0]
    except RowError as error:
        return error.finding
