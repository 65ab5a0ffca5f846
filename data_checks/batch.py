"""The examples of one block on their way: as columns, what is wrong with them beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from data_checks.result import Defects
from data_checks.rows import (
    Dropped,
    FeedbackRow,
    Finding,
    PairRow,
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

    origins: list[RawRow] = field(default_factory=list)
    rows: list[Row | None] = field(default_factory=list)
    """None for what could not be cut into prompt and answers, and for plain pairs, which have no more than texts."""
    sources: list[str | None] = field(default_factory=list)
    prompts: list[Turns | None] = field(default_factory=list)
    chosen: list[Turns | None] = field(default_factory=list)
    rejected: list[Turns | None] = field(default_factory=list)
    findings: dict[int, list[Finding]] = field(default_factory=dict)
    """Place -> what is wrong there; places in order."""
    dropped: dict[int, Dropped] = field(default_factory=dict)
    """Place -> the policy that leaves it out."""
    known: list[tuple[int, Row]] = field(default_factory=list)
    """Place and row of all that have more than their texts."""

    def __len__(self) -> int:
        return len(self.origins)

    def add_plain(self, raw: RawRow, source: str, prompt: str, chosen: str, rejected: str) -> None:
        """Add a pair of two answers to one question in which nothing is wrong."""
        self.origins.append(raw)
        self.rows.append(None)
        self.sources.append(source)
        self.prompts.append((("user", prompt),))  # type: ignore[arg-type]
        self.chosen.append((("assistant", chosen),))  # type: ignore[arg-type]
        self.rejected.append((("assistant", rejected),))  # type: ignore[arg-type]

    def add(self, raw: RawRow, row: Row | None, findings: list[Finding], dropped: Dropped | None = None) -> None:
        """Add an example of any kind.

        Args:
            raw: the row it comes from.
            row: prompt and answers, if it could be cut.
            findings: what is wrong with it; the row's own list, to which more may be added later.
            dropped: the policy that leaves it out.
        """
        if findings:
            self.findings[len(self)] = findings
        elif dropped is not None:
            self.dropped[len(self)] = dropped
        if row is not None:
            self.known.append((len(self), row))
        self.origins.append(raw)
        self.rows.append(row)
        self.sources.append(None if row is None else row.source)
        self.prompts.append(None if row is None else row.prompt)
        self.chosen.append(_answer(row))
        self.rejected.append(row.rejected if isinstance(row, PairRow) else None)

    def usable_rows(self) -> list[Row]:
        """Return the rows, plain pairs aside, in which nothing was found and that no policy leaves out."""
        return [
            row
            for place, row in self.known
            if not row.findings and place not in self.findings and place not in self.dropped
        ]

    def collect_findings(self) -> None:
        """Take over what later rules added to the rows' own lists."""
        found = {place: row.findings for place, row in self.known if row.findings and place not in self.findings}
        if found:
            self.findings = dict(sorted({**self.findings, **found}.items()))

    def add_finding(self, place: int, finding: Finding) -> None:
        """Note that something is wrong with an example."""
        row = self.rows[place]
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
                    found.examples.append(f"{self.origins[place].file}:{self.origins[place].number}")
        return defects


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
