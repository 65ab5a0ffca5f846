"""Pass 1: one block of a file becomes examples, judged each on its own, and is laid down on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data_checks.batch import Batch, Row
from data_checks.config import CheckDataConfig
from data_checks.examples import ExampleColumns
from data_checks.formats import FORMATS
from data_checks.formats.base import Options, Result, RowError
from data_checks.pass_rates import PassRates
from data_checks.result import Defects
from data_checks.rows import Dropped, FeedbackRow, Finding, PairRow, Policy, PromptItem, RawRow, Reason, StepwiseRow
from data_checks.rules import feedback_findings, is_blank, pair_findings, prompt_findings, stepwise_findings
from data_checks.tokens import Limits, measure_answers, measure_pairs, measure_prompts

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from data_checks.reading.block import Block, TextRows
    from data_checks.whole.contamination import EvaluationIndex

PLAIN_FORMAT = "pairs"
PLAIN_KEYS = ("prompt", "chosen", "rejected")
ALL_HASHES = 2**63 - 1
"""No content hash is larger."""


@dataclass(frozen=True)
class FileTask:
    """How the rows of one file are read."""

    table: str
    """Kind of input: one of `result.INPUT_TABLES`."""
    path: Path
    name: str
    """What the file is called in tables and reports."""
    label: str
    """What it is called in error messages: the config's field and the path there."""
    format: str
    options: Options
    ties: Literal["drop", "keep"] | None = None


@dataclass
class Chunk:
    """What one block became. Its examples lie in files of the work folder."""

    number: int
    table: str
    rows: int
    examples: int
    canonical: Path | None
    """None where no tables are wanted."""
    features: Path
    sketches: Path | None
    prefixes: Path | None
    defects: dict[str, Defects]
    """Of findings so far; what needs all rows comes later."""
    pass_rates: PassRates
    """What the rows say of how often prompts are solved."""
    sample: pa.Table
    """Numbers and texts of the examples that may be in the sample."""


def convert(rows: Iterable[RawRow], task: FileTask) -> Batch:
    """Return the examples of rows as read, each judged on its own, tokens aside.

    Args:
        rows: of one file.
        task: how they are read.
    """
    batch = Batch(task.name, task.options.source)
    for raw in rows:
        for row, findings, dropped in _examples_of(raw, task):
            batch.add(raw, row, findings, dropped)
    return batch


def read_and_convert(block: Block, task: FileTask, *, may_be_plain: bool) -> tuple[int, Batch]:
    """Return how many rows a block has, and its examples.

    Args:
        block: where the rows are.
        task: how they are read.
        may_be_plain: whether pairs of three texts may take the short way. What is found is the same, but they have no
            `Row`.
    """
    from data_checks.reading import read_block

    if may_be_plain and task.format == PLAIN_FORMAT and (texts := block.texts(PLAIN_KEYS)) is not None:
        return len(texts.numbers), convert_texts(texts, task)
    rows = read_block(block)
    return len(rows), convert(rows, task)


def convert_texts(rows: TextRows, task: FileTask) -> Batch:
    """Return what `convert` would of rows that are nearly all pairs of three texts in which nothing is wrong."""
    batch = Batch.of_texts(rows, task.options.source)
    odd = dict(rows.odd)
    unseen = {
        place for column in rows.columns for place, text in enumerate(column) if not text.isascii() and is_blank(text)
    }
    stripped = (map(str.strip, column) for column in rows.columns)
    for place, (prompt, one, other) in enumerate(zip(*stripped, strict=True)):
        if (not (prompt and one and other) or one == other or place in unseen) and place not in odd:
            value = dict(zip(PLAIN_KEYS, (column[place] for column in rows.columns), strict=True))
            raw = rows.raws[place].decode()
            odd[place] = RawRow(rows.name, rows.numbers[place], raw, value, None, rows.offsets[place])
    for place, raw_row in sorted(odd.items()):
        ((row, findings, dropped),) = _examples_of(raw_row, task)  # The plain format makes one example of one row.
        batch.put(place, row, findings, dropped)
    return batch


Example = tuple[Row | None, list[Finding], Dropped | None]


def _examples_of(raw: RawRow, task: FileTask) -> list[Example]:
    if raw.finding is not None:
        return [(None, [raw.finding], None)]
    results: Sequence[Result]
    try:
        results = FORMATS[task.format].convert(raw, task.options)
    except RowError as error:
        results = [error.finding]
    assert results, f"format {task.format} lost a row"
    return [_judged(result, task) for result in results]


def _judged(result: Result, task: FileTask) -> Example:
    """Return an example with all that is wrong with it by itself."""
    if isinstance(result, Finding):
        return None, [result], None
    if isinstance(result, Dropped):
        return None, [], result
    if isinstance(result, PairRow):
        result.findings += pair_findings(result)
        dropped = _tie(result, task.ties)
        return result, result.findings, dropped
    if isinstance(result, FeedbackRow):
        result.findings += feedback_findings(result)
    elif isinstance(result, StepwiseRow):
        result.findings += stepwise_findings(result)
    else:
        result.findings += prompt_findings(result)
    return result, result.findings, None


def _tie(row: PairRow, policy: Literal["drop", "keep"] | None) -> Dropped | None:
    """Mark a pair in which nothing is preferred, and say what becomes of it."""
    same_score = row.chosen_score is not None and row.chosen_score == row.rejected_score
    row.is_tie = row.is_tie or row.margin == 0 or same_score
    if not row.is_tie or row.findings:
        return None
    if policy is None:
        row.findings.append(Finding(Reason.UNDECLARED_TIE, "margin 0, equal scores or ranks, or a label that says tie"))
    elif policy == "drop":
        return Dropped(Policy.TIE, "ties: drop")
    elif row.margin is None:
        row.margin = 0.0
    return None


@dataclass(frozen=True)
class Judge:
    """What examining a block needs."""

    config: CheckDataConfig
    folder: Path
    """The work folder."""
    tokenizer_folder: Path | None
    limits: Limits | None
    keeps_rows: bool = True
    """Whether the examples are laid down as they are, for tables; else only numbers on them."""
    evaluation: EvaluationIndex | None = None
    """The prompts of the file of evaluation prompts."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Loaded once in each process, never sent to another."""

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> Judge:
        return replace(self, tokenizer=tokenizer)

    def examine(self, number: int, block: Block, task: FileTask, sample_limit: int = ALL_HASHES) -> Chunk:
        """Read, convert, judge and measure one block; write its examples to files of the work folder.

        Args:
            number: of the block, counted over all files in order; what is written depends on nothing else.
            block: where the rows are.
            task: how its file is read.
            sample_limit: largest content hash that may still be in the sample.
        """
        # Tokens are counted on rows, which plain pairs are not.
        num_rows, batch = read_and_convert(block, task, may_be_plain=self.tokenizer is None)
        self._measure(batch)
        columns = ExampleColumns.of(batch, number, FORMATS[task.format].label_kind)
        self._judge_texts(batch, columns)
        if self.evaluation is not None and task.table != "eval_prompts":
            self._hold_out(batch, columns, self.evaluation)
        return self._write(number, task, num_rows, batch, columns, sample_limit)

    def _measure(self, batch: Batch) -> None:
        if self.tokenizer is None or self.limits is None:
            return
        rows = batch.usable_rows()
        allowed = self.config.allowed_special_tokens
        measure_pairs([r for r in rows if isinstance(r, PairRow)], self.tokenizer, self.limits, allowed)
        answers = [r for r in rows if isinstance(r, FeedbackRow | StepwiseRow)]
        measure_answers(answers, self.tokenizer, self.limits, allowed)
        measure_prompts([r for r in rows if isinstance(r, PromptItem)], self.tokenizer, self.limits, allowed)
        batch.collect_findings()

    def _judge_texts(self, batch: Batch, columns: ExampleColumns) -> None:
        """Add the findings that come from what stands in a text."""
        from data_checks.gold import gold_findings

        if self.config.secrets == "quarantine":
            for place in columns.with_secrets():
                batch.add_finding(place, Finding(Reason.SECRET, "a text holds what looks like a key or password"))
        items = [row for row in batch.usable_rows() if isinstance(row, PromptItem)]
        for item, finding in zip(items, gold_findings(items), strict=True):
            if finding is not None:
                item.findings.append(finding)
        if items:
            batch.collect_findings()

    def _hold_out(self, batch: Batch, columns: ExampleColumns, index: EvaluationIndex) -> None:
        for place in columns.contaminated(index):
            if place not in batch.findings:
                detail = "an evaluation prompt, or most of its words in order, stands in the row"
                batch.add_finding(place, Finding(Reason.PROMPT_IN_EVALUATION, detail))

    def _write(
        self, number: int, task: FileTask, num_rows: int, batch: Batch, columns: ExampleColumns, sample_limit: int
    ) -> Chunk:
        stem = self.folder / f"{task.table}-{number:07d}"
        canonical = columns.write_canonical(stem.with_suffix(".arrow")) if self.keeps_rows else None
        features, sample = columns.write_features(stem.with_suffix(".features.parquet"), sample_limit)
        sketches = None
        if self.config.near_duplicates is not None:
            sketches = columns.write_sketches(stem.with_suffix(".sketches.parquet"))
        prefixes = columns.write_prefixes(stem.with_suffix(".prefixes.parquet"))
        rates = PassRates()
        rates.add([row for row in batch.usable_rows() if isinstance(row, PromptItem)])
        files = (canonical, features, sketches, prefixes)
        return Chunk(number, task.table, num_rows, len(batch), *files, batch.defects(), rates, sample)
