"""Which format a file of preferences has, and the evidence for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from data_checks.config import FormatName
from data_checks.formats import ANSWER_COLUMNS, FEEDBACK_COLUMNS, HH_MARKER, PAIR_COLUMNS
from data_checks.rows import RawRow, name_columns
from training_core.errors import DataError

SAMPLE_ROWS = 200
CLEAR_SHARE = 0.9
"""Share of sampled rows that must look alike; real files hold some defective rows."""
JUDGEMENTS = ("label", "thumb", "rating")
MAX_COLUMNS = 50
"""Most columns that the evidence names: the most frequent ones."""
CHOICES = "format: pairs (prompt, chosen, rejected) or format: hh (whole Human/Assistant transcripts)"
ONE_TEXT = (
    "It looks like one JSON text over many lines; JSONL has one object a line. Convert it: jq -c '.[]' FILE > "
    "FILE.jsonl for a list, jq -c . FILE > FILE.jsonl for objects one after the other"
)


@dataclass(frozen=True)
class FormatEvidence:
    """What a file was read as, and why."""

    path: str
    format: str
    decided_by: str
    """`config` or `columns`."""
    evidence: list[str]
    columns: dict[str, int]
    """Column name -> rows in which it is not null."""
    unused_columns: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def identify(name: str, rows: list[RawRow], wanted: FormatName, label: str | None = None) -> FormatEvidence:
    """Return the format of a file: the one asked for, or the one its columns show.

    Args:
        name: what to call it in the evidence.
        rows: all of them.
        wanted: what the config says.
        label: what to call it in messages. Default: the name.

    Raises:
        DataError: no row is readable, no known format fits, or two do.
    """
    refuse_unreadable(label or name, rows)
    counted = Counter(key for row in rows if row.value for key in row.value)
    columns = dict(sorted(counted.most_common(MAX_COLUMNS)))
    if wanted != "auto":
        chosen: str = wanted
        evidence = ["named in the config"]
    else:
        chosen, evidence = detect(label or name, [row.value for row in rows if row.value is not None][:SAMPLE_ROWS])
    unused = [column for column in columns if column not in PAIR_COLUMNS]
    return FormatEvidence(name, chosen, "columns" if wanted == "auto" else "config", evidence, columns, unused)


def feedback_evidence(name: str, rows: list[RawRow], label: str) -> FormatEvidence:
    """Return what a file of feedback holds.

    Raises:
        DataError: no row is readable, or none has the columns of feedback.
    """
    refuse_unreadable(label, rows)
    values = [row.value for row in rows if row.value is not None]
    counted = Counter(key for value in values for key in value)
    columns = dict(sorted(counted.most_common(MAX_COLUMNS)))
    if not counted["prompt"] or not any(counted[column] for column in ANSWER_COLUMNS):
        raise DataError(
            f"{label}: feedback rows need prompt and one of {', '.join(ANSWER_COLUMNS)}; columns found: "
            f"{name_columns(counted)}. Rename the columns; files of chosen and rejected answers belong in "
            "data.preferences"
        )
    evidence = ["named in the config", *(f"{counted[c]} of {len(values)} rows have {c}" for c in JUDGEMENTS)]
    unused = [column for column in columns if column not in FEEDBACK_COLUMNS]
    return FormatEvidence(name, "feedback", "config", evidence, columns, unused)


def refuse_unreadable(name: str, rows: list[RawRow]) -> None:
    """Refuse a file of which no row could be read: it is of another kind than its name says.

    Raises:
        DataError: says what is wrong with the first row.
    """
    if any(row.value is not None for row in rows):
        return
    first = rows[0]
    start = first.raw.strip()
    # An opening bracket alone, or a list of rows on one line.
    hint = ONE_TEXT if start in ("{", "[") or start.startswith("[{") else "Write one JSON object a line, as UTF-8"
    why = first.finding.detail if first.finding else "it is empty"
    what = "its only row" if len(rows) == 1 else f"none of its {len(rows)} rows"
    raise DataError(
        f"{name}: {what} could {'not ' if len(rows) == 1 else ''}be read; row {first.number}: {why}. {hint}"
    )


def detect(name: str, sample: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return `pairs` or `hh` and the evidence, from rows that could be read.

    Raises:
        DataError: see `identify`.
    """
    if not sample:
        raise DataError(f"{name}: no row could be read, so its format is unknown")
    total = len(sample)
    with_both = [value for value in sample if "chosen" in value and "rejected" in value]
    num_prompt = sum("prompt" in value for value in with_both)
    num_transcripts = sum(_is_transcript(value["chosen"]) or _is_transcript(value["rejected"]) for value in with_both)
    num_messages = sum(isinstance(value["chosen"], list) and isinstance(value["rejected"], list) for value in with_both)
    evidence = [
        f"{len(with_both)} of {total} sampled rows have chosen and rejected",
        f"{num_prompt} of them have a prompt",
        f"in {num_transcripts} of them a side is a text that starts with a Human or Assistant marker",
        f"in {num_messages} of them both sides are lists of messages",
    ]
    if len(with_both) < CLEAR_SHARE * total:
        found = name_columns({key for value in sample for key in value})
        raise DataError(
            f"{name}: {evidence[0]}; columns found: {found}. Preference rows need chosen and rejected. "
            f"Rename the columns, or, if only some rows are bad, write {CHOICES} beside its path"
        )
    enough = CLEAR_SHARE * len(with_both)
    looks_hh, looks_pairs = num_transcripts >= enough, num_prompt >= enough or num_messages >= enough
    if looks_hh and not num_prompt and not num_messages:
        return "hh", evidence
    if looks_pairs and not num_transcripts:
        return "pairs", evidence
    if num_transcripts:
        raise DataError(f"{name}: the format is ambiguous: {'; '.join(evidence)}. Write {CHOICES} beside its path")
    raise DataError(
        f"{name}: no prompt can be told: {'; '.join(evidence)}. Texts are never cut where their characters stop being "
        f"equal: add a prompt column, or write messages with roles. If only some rows are bad, write {CHOICES} "
        "beside its path"
    )


def _is_transcript(value: Any) -> bool:
    return isinstance(value, str) and HH_MARKER.match(value) is not None
