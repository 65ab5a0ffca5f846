"""One check from files to tables: no config file, stage or Great Expectations needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from data_checks.config import CheckDataConfig
from data_checks.contamination import mark_held_out
from data_checks.detection import FormatEvidence, identify, refuse_unreadable
from data_checks.formats import parse_pair, parse_prompt
from data_checks.keys import dataset_fingerprint, exact_prompt_id, group_id, turns_key
from data_checks.readers import read_rows
from data_checks.rows import Finding, PairRow, PromptItem, Quarantined, RawRow, Reason, quarantine
from data_checks.rules import mark_duplicates_and_conflicts, mark_repeated_prompts, pair_findings, prompt_findings
from data_checks.splits import is_validation
from data_checks.tokens import Limits, Progress, measure_pairs, measure_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_EXAMPLES = 5

Entry = tuple[RawRow, PairRow | PromptItem | Finding]
"""A row as read, and what became of it."""


@dataclass(frozen=True)
class InputFiles:
    """Where the files of a `CheckDataConfig` lie: the config names them, a stage may hold them elsewhere."""

    preferences: list[Path]
    rl_prompts: Path | None = None
    eval_prompts: Path | None = None

    @classmethod
    def of_config(cls, config: CheckDataConfig) -> InputFiles:
        rl, evaluation = config.rl_prompts, config.eval_prompts
        return cls(
            [Path(file.path) for file in config.preferences],
            None if rl is None else Path(rl),
            None if evaluation is None else Path(evaluation),
        )


@dataclass
class Defects:
    """How often a defect was found, whatever a row was counted under."""

    rows: int = 0
    transcripts: int = 0
    """Sides (chosen or rejected) that have it; 0 for a defect of the whole row."""
    examples: list[str] = field(default_factory=list)
    """The first places, as file:row."""


@dataclass
class TableCounts:
    """The account of one kind of input: rows == kept + the sum of quarantined."""

    rows: int
    kept: int
    quarantined: dict[str, int]
    defects: dict[str, Defects]

    def __post_init__(self) -> None:
        assert self.rows == self.kept + sum(self.quarantined.values()), f"a row is lost: {self}"

    @property
    def num_quarantined(self) -> int:
        return sum(self.quarantined.values())

    @property
    def quarantined_fraction(self) -> float:
        return self.num_quarantined / self.rows if self.rows else 0.0


@dataclass
class CheckedData:
    """What is used, what is not, and the counts of both."""

    train: list[PairRow]
    validation: list[PairRow]
    rl_prompts: list[PromptItem]
    eval_prompts: list[PromptItem]
    quarantined: list[Quarantined]
    counts: dict[str, TableCounts]
    """`preferences`, and `rl_prompts`, `eval_prompts` when these were read from files."""
    formats: list[FormatEvidence]
    limits: Limits
    fingerprint: str
    num_duplicates: int
    """Usable rows that repeat another one, kept or not."""
    num_conflicts: int

    @property
    def pairs(self) -> list[PairRow]:
        return [*self.train, *self.validation]


def no_progress(step: int, total: int, phase: str) -> None:
    """Report to no one."""


def check_dataset(
    files: InputFiles,
    config: CheckDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: Progress = no_progress,
) -> CheckedData:
    """Read, judge and split a data set; every row of every file ends up used or quarantined.

    Args:
        files: where the files lie.
        config: what is allowed.
        tokenizer: with a chat template and an EOS token.
        seed: of the split.
        progress: called with (done, total, phase).

    Raises:
        ConfigurationError: a file is missing or of a kind that is not read.
        DataError: a file cannot be read, is empty, or its format is unknown or ambiguous.
    """
    limits, allowed = Limits.of(config, tokenizer), config.allowed_special_tokens
    formats, pair_entries = _read_pairs(files.preferences, config)
    eval_entries = _read_prompts(files.eval_prompts, config.eval_prompts, "data.eval_prompts")
    rl_entries = _read_prompts(files.rl_prompts, config.rl_prompts, "data.rl_prompts")
    pairs, eval_items, rl_items = (
        _parsed(pair_entries, PairRow),
        _parsed(eval_entries, PromptItem),
        _parsed(rl_entries, PromptItem),
    )

    measure_pairs(pairs, tokenizer, limits, allowed, progress)
    for items in (eval_items, rl_items):
        measure_prompts(items, tokenizer, limits, allowed)
    mark_repeated_prompts(eval_items)
    mark_held_out(pairs, {group_id(item.prompt) for item in _usable(eval_items)})
    num_duplicates, num_conflicts = mark_duplicates_and_conflicts(_usable(pairs), config)
    train, validation = _split(_usable(pairs), seed, config.validation_fraction)
    eval_prompts = _usable(eval_items) if files.eval_prompts else distinct_prompts(validation)
    mark_held_out(rl_items, {group_id(item.prompt) for item in eval_prompts})
    mark_repeated_prompts(rl_items)
    rl_prompts = _usable(rl_items) if files.rl_prompts else distinct_prompts(train)

    counts: dict[str, TableCounts] = {}
    quarantined: list[Quarantined] = []
    for name, entries in (("preferences", pair_entries), ("rl_prompts", rl_entries), ("eval_prompts", eval_entries)):
        if entries:
            counts[name], rejected = account(entries)
            quarantined += rejected
    return CheckedData(
        train=train,
        validation=validation,
        rl_prompts=rl_prompts,
        eval_prompts=eval_prompts,
        quarantined=quarantined,
        counts=counts,
        formats=formats,
        limits=limits,
        fingerprint=dataset_fingerprint(pairs),
        num_duplicates=num_duplicates,
        num_conflicts=num_conflicts,
    )


def distinct_prompts(rows: Sequence[PairRow]) -> list[PromptItem]:
    """Return each prompt of the pairs once, in order of first appearance."""
    first: dict[str, PromptItem] = {}
    for row in rows:
        item = PromptItem(None, row.prompt, exact_prompt_id(row.prompt), prompt_tokens=row.prompt_tokens)
        first.setdefault(turns_key(row.prompt), item)
    return list(first.values())


def account(entries: Sequence[Entry]) -> tuple[TableCounts, list[Quarantined]]:
    """Return the counts of one kind of input and its quarantined rows."""
    quarantined: list[Quarantined] = []
    defects: dict[str, Defects] = {}
    for origin, parsed in entries:
        findings = [parsed] if isinstance(parsed, Finding) else parsed.findings
        for reason in dict.fromkeys(finding.reason for finding in findings):
            defect = defects.setdefault(reason.value, Defects())
            defect.rows += 1
            defect.transcripts += sum(finding.reason == reason and finding.side is not None for finding in findings)
            if len(defect.examples) < MAX_EXAMPLES:
                defect.examples.append(f"{origin.file}:{origin.number}")
        if findings:
            quarantined.append(quarantine(origin, findings))
    found = Counter(row.reason for row in quarantined)
    by_reason = {reason.value: found[reason] for reason in Reason if found[reason]}
    kept = sum(not isinstance(parsed, Finding) and not parsed.findings for _, parsed in entries)
    ordered = {name: defects[name] for name in map(str, Reason) if name in defects}
    return TableCounts(len(entries), kept, by_reason, ordered), quarantined


def _read_pairs(paths: Sequence[Path], config: CheckDataConfig) -> tuple[list[FormatEvidence], list[Entry]]:
    formats: list[FormatEvidence] = []
    entries: list[Entry] = []
    for index, (path, file) in enumerate(zip(paths, config.preferences, strict=True)):
        label = f"data.preferences.{index}.path: {file.path}"
        raw = read_rows(path, file.path, label)
        formats.append(identify(file.path, raw, file.format, label))
        for row in raw:
            parsed = row.finding or parse_pair(row, formats[-1].format, file.source or Path(file.path).name)
            if isinstance(parsed, PairRow):
                parsed.findings += pair_findings(parsed)
            entries.append((row, parsed))
    return formats, entries


def _read_prompts(path: Path | None, name: str | None, field_path: str) -> list[Entry]:
    if path is None:
        return []
    entries: list[Entry] = []
    name = name or path.name
    label = f"{field_path}: {name}"
    rows = read_rows(path, name, label)
    refuse_unreadable(label, rows)
    for row in rows:
        parsed = row.finding or parse_prompt(row)
        if isinstance(parsed, PromptItem):
            parsed.findings += prompt_findings(parsed)
        entries.append((row, parsed))
    return entries


def _split(rows: Sequence[PairRow], seed: int, fraction: float) -> tuple[list[PairRow], list[PairRow]]:
    held_out = [is_validation(group_id(row.prompt), seed, fraction) for row in rows]
    train = [row for row, is_held_out in zip(rows, held_out, strict=True) if not is_held_out]
    return train, [row for row, is_held_out in zip(rows, held_out, strict=True) if is_held_out]


Parsed = TypeVar("Parsed", PairRow, PromptItem)


def _parsed(entries: Sequence[Entry], kind: type[Parsed]) -> list[Parsed]:
    return [parsed for _, parsed in entries if isinstance(parsed, kind)]


def _usable(rows: Sequence[Parsed]) -> list[Parsed]:
    return [row for row in rows if not row.findings]
