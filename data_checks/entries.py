"""The rows of a check's files: read, cut into prompt and answers, and judged each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data_checks.config import CheckDataConfig
from data_checks.detection import FormatEvidence, feedback_evidence, identify, refuse_unreadable
from data_checks.files import distinct_names
from data_checks.formats import parse_feedback, parse_pair, parse_prompt
from data_checks.readers import read_rows
from data_checks.rows import FeedbackRow, Finding, PairRow, PromptItem, RawRow
from data_checks.rules import feedback_findings, pair_findings, prompt_findings

Entry = tuple[RawRow, PairRow | FeedbackRow | PromptItem | Finding]
"""A row as read, and what became of it. Its parsed JSON is gone: the turns hold what is used of it."""
Parsed = TypeVar("Parsed", PairRow, FeedbackRow, PromptItem)


@dataclass(frozen=True)
class InputFiles:
    """Where the files of a `CheckDataConfig` lie: the config names them, a stage may hold them elsewhere."""

    preferences: list[Path]
    rl_prompts: Path | None = None
    eval_prompts: Path | None = None
    feedback: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Entries:
    """Every row of every file."""

    preferences: list[Entry]
    rl_prompts: list[Entry]
    eval_prompts: list[Entry]
    feedback: list[Entry]
    formats: list[FormatEvidence]

    @property
    def by_table(self) -> dict[str, list[Entry]]:
        """The kinds of input that have rows, in the order of reports."""
        names = ("preferences", "feedback", "rl_prompts", "eval_prompts")
        tables: dict[str, list[Entry]] = {name: getattr(self, name) for name in names}
        return {name: entries for name, entries in tables.items() if entries}


def read_entries(files: InputFiles, config: CheckDataConfig) -> Entries:
    """Read every file.

    Raises:
        ConfigurationError: a file is missing or of a kind that is not read.
        DataError: a file cannot be read, is empty, or its format is unknown or ambiguous.
    """
    paths = {f"preferences_{index}": file.path for index, file in enumerate(config.preferences)}
    paths |= {f"feedback_{index}": file.path for index, file in enumerate(config.feedback)}
    paths |= {
        name: path for name, path in (("rl_prompts", config.rl_prompts), ("eval_prompts", config.eval_prompts)) if path
    }
    names = distinct_names(paths)
    formats, pairs = _read_pairs(files.preferences, config, names)
    feedback_formats, feedback = _read_feedback(files.feedback, config, names)
    rl_prompts, eval_prompts = (
        _read_prompts(path, names.get(name, name), f"data.{name}: {paths.get(name, path)}")
        for name, path in (("rl_prompts", files.rl_prompts), ("eval_prompts", files.eval_prompts))
    )
    return Entries(pairs, rl_prompts, eval_prompts, feedback, formats + feedback_formats)


def parsed(entries: Sequence[Entry], kind: type[Parsed]) -> list[Parsed]:
    """Return the rows that could be cut into prompt and answers, defects included."""
    return [item for _, item in entries if isinstance(item, kind)]


def usable(rows: Sequence[Parsed]) -> list[Parsed]:
    """Return the rows in which nothing was found so far."""
    return [row for row in rows if not row.findings]


def _read_pairs(
    paths: Sequence[Path], config: CheckDataConfig, names: dict[str, str]
) -> tuple[list[FormatEvidence], list[Entry]]:
    formats: list[FormatEvidence] = []
    entries: list[Entry] = []
    sources = distinct_names({name: Path(path).name for name, path in names.items()})
    for index, (path, file) in enumerate(zip(paths, config.preferences, strict=True)):
        key, label = f"preferences_{index}", f"data.preferences.{index}.path: {file.path}"
        raw = read_rows(path, names[key], label)
        formats.append(identify(names[key], raw, file.format, label))
        for row in raw:
            result = row.finding or parse_pair(row, formats[-1].format, file.source or sources[key])
            origin = row.without_value()
            if isinstance(result, PairRow):
                result.origin = origin
                result.findings += pair_findings(result)
            entries.append((origin, result))
    return formats, entries


def _read_feedback(
    paths: Sequence[Path], config: CheckDataConfig, names: dict[str, str]
) -> tuple[list[FormatEvidence], list[Entry]]:
    formats: list[FormatEvidence] = []
    entries: list[Entry] = []
    sources = distinct_names({name: Path(path).name for name, path in names.items()})
    for index, (path, file) in enumerate(zip(paths, config.feedback, strict=True)):
        key, label = f"feedback_{index}", f"data.feedback.{index}.path: {file.path}"
        raw = read_rows(path, names[key], label)
        formats.append(feedback_evidence(names[key], raw, label))
        for row in raw:
            result = row.finding or parse_feedback(row, file.source or sources[key], file.rating_threshold)
            origin = row.without_value()
            if isinstance(result, FeedbackRow):
                result.origin = origin
                result.findings += feedback_findings(result)
            entries.append((origin, result))
    return formats, entries


def _read_prompts(path: Path | None, name: str, label: str) -> list[Entry]:
    if path is None:
        return []
    entries: list[Entry] = []
    rows = read_rows(path, name, label)
    refuse_unreadable(label, rows)
    for row in rows:
        result = row.finding or parse_prompt(row)
        origin = row.without_value()
        if isinstance(result, PromptItem):
            result.origin = origin
            result.findings += prompt_findings(result)
        entries.append((origin, result))
    return entries
