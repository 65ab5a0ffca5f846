"""Readable rows to pairs, judged answers and prompts. Conversations are cut at turns, never at characters."""

from data_checks.formats.base import Format, Kind, Options, Result, RowError
from data_checks.formats.markers import split_transcript
from data_checks.formats.registry import FORMATS
from data_checks.formats.single import parse_feedback, parse_pair, parse_prompt

__all__ = [
    "FORMATS",
    "Format",
    "Kind",
    "Options",
    "Result",
    "RowError",
    "parse_feedback",
    "parse_pair",
    "parse_prompt",
    "split_transcript",
]
