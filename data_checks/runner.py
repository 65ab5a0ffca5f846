"""One check from files to tables: no config file, stage or Great Expectations needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from data_checks.config import CheckDataConfig
from data_checks.contamination import mark_held_out
from data_checks.detection import FormatEvidence
from data_checks.entries import Entries, Entry, InputFiles, parsed, read_entries, usable
from data_checks.keys import dataset_fingerprint, exact_prompt_id, group_id, turns_key
from data_checks.rows import FeedbackRow, Finding, PairRow, PromptItem, Quarantined, Reason, quarantine
from data_checks.rules import (
    mark_duplicates_and_conflicts,
    mark_feedback_duplicates_and_conflicts,
    mark_repeated_prompts,
)
from data_checks.splits import is_validation
from data_checks.tokens import Limits, ReportProgress, measure_feedback, measure_pairs, measure_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Judged = TypeVar("Judged", PairRow, FeedbackRow)
MAX_EXAMPLES = 5


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
    """Of `preferences`, `feedback`, `rl_prompts` and `eval_prompts` what was read from files."""
    formats: list[FormatEvidence]
    limits: Limits
    fingerprint: str
    num_duplicates: int
    """Usable pairs that repeat another one, kept or not."""
    num_conflicts: int
    train_feedback: list[FeedbackRow] = field(default_factory=list)
    validation_feedback: list[FeedbackRow] = field(default_factory=list)
    num_feedback_duplicates: int = 0
    num_feedback_conflicts: int = 0

    @property
    def pairs(self) -> list[PairRow]:
        return [*self.train, *self.validation]

    @property
    def feedback(self) -> list[FeedbackRow]:
        return [*self.train_feedback, *self.validation_feedback]

    def count_of(self, table: str) -> TableCounts:
        """Return the account of one kind of input; of one that was not read: no rows."""
        return self.counts.get(table) or TableCounts(0, 0, {}, {})


def no_progress(step: int, total: int, phase: str) -> None:
    """Report to no one."""


def check_dataset(
    files: InputFiles,
    config: CheckDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: ReportProgress = no_progress,
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
    limits = Limits.of(config, tokenizer)
    entries = read_entries(files, config)
    _measure(entries, tokenizer, limits, config.allowed_special_tokens, progress)
    return _judge_together(entries, config, limits, seed)


def _measure(
    entries: Entries,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    allowed: Sequence[str],
    progress: ReportProgress,
) -> None:
    measure_pairs(parsed(entries.preferences, PairRow), tokenizer, limits, allowed, progress)
    measure_feedback(parsed(entries.feedback, FeedbackRow), tokenizer, limits, allowed, progress)
    for prompts in (entries.eval_prompts, entries.rl_prompts):
        measure_prompts(parsed(prompts, PromptItem), tokenizer, limits, allowed, progress)


def _judge_together(entries: Entries, config: CheckDataConfig, limits: Limits, seed: int) -> CheckedData:
    """Apply what needs all rows. The order matters: what is held out is known before what may be trained on."""
    pairs, feedback = parsed(entries.preferences, PairRow), parsed(entries.feedback, FeedbackRow)
    eval_items, rl_items = parsed(entries.eval_prompts, PromptItem), parsed(entries.rl_prompts, PromptItem)
    mark_repeated_prompts(eval_items)
    evaluation_groups = {group_id(item.prompt) for item in usable(eval_items)}
    mark_held_out(pairs, evaluation_groups)
    mark_held_out(feedback, evaluation_groups)
    num_duplicates, num_conflicts = mark_duplicates_and_conflicts(usable(pairs), config)
    num_feedback_duplicates, num_feedback_conflicts = mark_feedback_duplicates_and_conflicts(usable(feedback), config)
    train, validation = _split(usable(pairs), seed, config.validation_fraction)
    train_feedback, validation_feedback = _split(usable(feedback), seed, config.validation_fraction)
    held_out = distinct_prompts([*validation, *validation_feedback])
    eval_prompts = usable(eval_items) if entries.eval_prompts else held_out
    mark_held_out(rl_items, {group_id(item.prompt) for item in eval_prompts})
    mark_repeated_prompts(rl_items)
    counts, quarantined = _account_all(entries)
    return CheckedData(
        train=train,
        validation=validation,
        rl_prompts=usable(rl_items) if entries.rl_prompts else distinct_prompts([*train, *train_feedback]),
        eval_prompts=eval_prompts,
        quarantined=quarantined,
        counts=counts,
        formats=entries.formats,
        limits=limits,
        fingerprint=dataset_fingerprint(pairs, feedback),
        num_duplicates=num_duplicates,
        num_conflicts=num_conflicts,
        train_feedback=train_feedback,
        validation_feedback=validation_feedback,
        num_feedback_duplicates=num_feedback_duplicates,
        num_feedback_conflicts=num_feedback_conflicts,
    )


def distinct_prompts(rows: Sequence[PairRow | FeedbackRow]) -> list[PromptItem]:
    """Return each prompt of the rows once, in order of first appearance."""
    first: dict[str, PromptItem] = {}
    for row in rows:
        item = PromptItem(None, row.prompt, exact_prompt_id(row.prompt), prompt_tokens=row.prompt_tokens)
        first.setdefault(turns_key(row.prompt), item)
    return list(first.values())


def account(entries: Sequence[Entry]) -> tuple[TableCounts, list[Quarantined]]:
    """Return the counts of one kind of input and its quarantined rows."""
    quarantined: list[Quarantined] = []
    defects: dict[str, Defects] = {}
    for origin, result in entries:
        findings = [result] if isinstance(result, Finding) else result.findings
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
    kept = sum(not isinstance(result, Finding) and not result.findings for _, result in entries)
    ordered = {name: defects[name] for name in map(str, Reason) if name in defects}
    return TableCounts(len(entries), kept, by_reason, ordered), quarantined


def _account_all(entries: Entries) -> tuple[dict[str, TableCounts], list[Quarantined]]:
    counts: dict[str, TableCounts] = {}
    quarantined: list[Quarantined] = []
    for name, rows in entries.by_table.items():
        counts[name], rejected = account(rows)
        quarantined += rejected
    return counts, quarantined


def _split(rows: Sequence[Judged], seed: int, fraction: float) -> tuple[list[Judged], list[Judged]]:
    sides: tuple[list[Judged], list[Judged]] = ([], [])
    for row in rows:
        sides[is_validation(group_id(row.prompt), seed, fraction)].append(row)
    return sides
