"""The examples of one block on their way: as columns, what is wrong with them beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from data_checks.columns import TurnColumn
from data_checks.reading.block import TextRows
from data_checks.result import Defects
from data_checks.rows import (
    Dropped,
    FeedbackRow,
    Finding,
    PairRow,
    Policy,
    PromptItem,
    RawRow,
    StepwiseRow,
    Turns,
    describe_findings,
)

Row = PairRow | FeedbackRow | PromptItem | StepwiseRow
MAX_EXAMPLES = 5
"""Places that are named of each defect."""


@dataclass
class Batch:
    """Examples in file order, an entry of each list an example."""

    file: str
    """What the rows' file is called."""
    source: str | None = None
    """The source of rows that name none, as those that cannot be read."""
    numbers: list[int] = field(default_factory=list)
    """Of the rows that the examples come from."""
    offsets: list[int | None] = field(default_factory=list)
    raws: list[str | bytes] = field(default_factory=list)
    """The rows as text, or as UTF-8 of which that is known."""
    rows: dict[int, Row] = field(default_factory=dict)
    """Place -> row of all that could be cut into prompt and answers and have more than their texts."""
    sources: list[str | None] = field(default_factory=list)
    prompts: TurnColumn = field(default_factory=lambda: TurnColumn("user"))
    chosen: TurnColumn = field(default_factory=lambda: TurnColumn("assistant"))
    rejected: TurnColumn = field(default_factory=lambda: TurnColumn("assistant"))
    findings: dict[int, list[Finding]] = field(default_factory=dict)
    """Place -> what is wrong there; places in order."""
    dropped: dict[int, Dropped] = field(default_factory=dict)
    """Place -> the policy that leaves it out."""

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of_texts(cls, rows: TextRows, source: str) -> Batch:
        """Return pairs of two answers to one question each, all of which stand in one source.

        Args:
            rows: prompt, chosen and rejected answer. In those that are odd anything may stand: `put` replaces them.
            source: of all of them.
        """
        batch = cls(rows.name, source, list(rows.numbers), list(rows.offsets), list(rows.raws))
        for place, row in rows.odd.items():
            batch.raws[place] = row.raw  # As UTF-8 it may not be readable.
        batch.sources = [source] * len(batch)
        for column, texts in zip((batch.prompts, batch.chosen, batch.rejected), rows.columns, strict=True):
            column.extend_texts(texts)
        return batch

    def add(self, raw: RawRow, row: Row | None, findings: list[Finding], dropped: Dropped | None = None) -> None:
        """Add an example of any kind.

        Args:
            raw: the row it comes from.
            row: prompt and answers, if it could be cut.
            findings: what is wrong with it; the row's own list, to which more may be added later.
            dropped: the policy that leaves it out.
        """
        place = len(self)
        # One row may have thousands of pairs that a cap leaves out: the first of them holds its text.
        is_capped = _is_capped(dropped) and _is_capped(self.dropped.get(place - 1))
        again = is_capped and self.numbers[-1] == raw.number
        self.numbers.append(raw.number)
        self.offsets.append(raw.offset)
        self.raws.append("" if again else raw.raw)
        self.sources.append(None)
        for column in (self.prompts, self.chosen, self.rejected):
            column.append(None)
        self.put(place, row, findings, dropped)

    def put(self, place: int, row: Row | None, findings: list[Finding], dropped: Dropped | None = None) -> None:
        """Say what an example is after all; arguments are those of `add`."""
        if findings:
            self.findings[place] = findings
        elif dropped is not None:
            self.dropped[place] = dropped
        if row is not None:
            self.rows[place] = row
        self.sources[place] = self.source if row is None else row.source
        self.prompts.put(place, None if row is None else row.prompt)
        self.chosen.put(place, _answer(row))
        self.rejected.put(place, row.rejected if isinstance(row, PairRow) else None)

    def usable_rows(self) -> list[Row]:
        """Return the rows, plain pairs aside, in which nothing was found and that no policy leaves out."""
        return [
            row
            for place, row in self.rows.items()
            if not row.findings and place not in self.findings and place not in self.dropped
        ]

    def collect_findings(self) -> None:
        """Take over what later rules added to the rows' own lists."""
        found = {place: row.findings for place, row in self.rows.items() if row.findings and place not in self.findings}
        if found:
            self.findings = dict(sorted({**self.findings, **found}.items()))

    def add_finding(self, place: int, finding: Finding) -> None:
        """Note that something is wrong with an example."""
        row = self.rows.get(place)
        if row is not None:
            row.findings.append(finding)
            self.collect_findings() if place not in self.findings else None
        else:
            self.findings.setdefault(place, []).append(finding)
            self.findings = dict(sorted(self.findings.items()))

    def defects(self) -> dict[str, Defects]:
        """Return how often each finding occurs, with its first places."""
        defects: dict[str, Defects] = {}
        for place, findings in self.findings.items():
            sides = Counter(finding.reason for finding in findings if finding.side is not None)
            for reason in dict.fromkeys(finding.reason for finding in findings):
                found = defects.setdefault(reason.value, Defects())
                found.rows += 1
                found.transcripts += sides[reason]
                if len(found.examples) < MAX_EXAMPLES:
                    found.detail = found.detail or describe_findings(findings)
                    found.examples.append(f"{self.file}:{self.numbers[place]}")
        return defects


def _is_capped(dropped: Dropped | None) -> bool:
    return dropped is not None and dropped.policy is Policy.PAIRS_PER_ROW


def _answer(row: Row | None) -> Turns | None:
    if isinstance(row, PairRow):
        return row.chosen
    return row.answer if isinstance(row, FeedbackRow | StepwiseRow) else None


def merge_defects(parts: Iterable[dict[str, Defects]], order: Sequence[str]) -> dict[str, Defects]:
    """Return the sum of counts; the parts come in file order.

    Args:
        parts: as `Batch.defects` gives them.
        order: of the result.
    """
    total: dict[str, Defects] = {}
    for part in parts:
        for name, found in part.items():
            own = total.setdefault(name, Defects(detail=found.detail))
            own.rows += found.rows
            own.transcripts += found.transcripts
            own.examples += found.examples[: MAX_EXAMPLES - len(own.examples)]
    return dict(sorted(total.items(), key=lambda item: order.index(item[0])))
