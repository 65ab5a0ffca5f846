"""Which format a file has, and the evidence for it: what the columns of its first rows are, never their texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_checks.formats.base import Format, Kind
from data_checks.formats.registry import FORMATS
from data_checks.naming import name_columns, shown_names
from data_checks.rows import RawRow
from training_core.errors import ConfigurationError, DataError

SAMPLE_ROWS = 2000
"""First rows of a file by which its format is told."""
CLEAR_SHARE = 0.9
"""Share of sampled rows that must have a format's structure; real files hold some defective rows."""
MAX_COLUMNS = 50
"""Most columns that the evidence names: the most frequent ones."""
MAX_NEAREST = 3
"""Most formats that a message names where none fits."""
PAIRS_ONLY: tuple[Kind, ...] = ("pairs",)
PLACES: dict[Kind, str] = {
    "pairs": "data.preferences",
    "feedback": "data.feedback",
    "prompts": "data.rl_prompts or data.eval_prompts",
    "stepwise": "`tidegate check FILE` (no stage trains on them)",
}
"""Where files of a kind belong."""
ONE_TEXT = (
    "It looks like one JSON text over many lines; JSONL has one object a line. Name the file .json if it is one list "
    "of objects; for objects one after the other: jq -c . FILE > FILE.jsonl"
)
NO_PROMPT = (
    "no prompt can be told: chosen and rejected are texts, and there is no prompt column. Texts are never cut where "
    "their characters stop being equal: add a prompt column, or write messages with roles"
)
TOKEN_IDS = (
    "the rows hold token ids, not texts. What a model reads cannot be checked without its tokenizer: give the texts"
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
    """Column name, as far as it may be shown -> sampled rows in which it is not null."""
    unused_columns: list[str] = field(default_factory=list)
    """Those that the format does not read: they are kept as JSON text in the column `extra`."""
    kind: Kind = "pairs"
    """What rows of the format become."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def identify(
    name: str,
    path: Path,
    label: str,
    kinds: Collection[Kind],
    wanted: str = "auto",
    options: Mapping[str, Any] | None = None,
) -> FormatEvidence:
    """Return the format of a file: the one asked for, or the one its first rows show.

    Args:
        name: what to call the file in the evidence.
        path: of the file.
        label: what to call it in messages.
        kinds: what its rows may become.
        wanted: the format that the config names, or `auto`.
        options: what the config says beside the path: `label` and `score`, where a format needs or knows them.

    Raises:
        ConfigurationError: see `detect`.
        DataError: the file cannot be read, no row is readable, no known format fits, or several do.
    """
    from data_checks.reading import iter_rows

    rows: list[RawRow] = []
    is_whole = True
    for chunk in iter_rows(path, name, label):
        rows += chunk[: SAMPLE_ROWS + 1 - len(rows)]
        if len(rows) > SAMPLE_ROWS:
            is_whole = False
            break
    rows = rows[:SAMPLE_ROWS]
    refuse_unreadable(label, rows, is_whole)
    values = [row.value for row in rows if row.value is not None]
    return detect(name, values, kinds, wanted, where=label, options=options)


def refuse_unreadable(name: str, rows: Sequence[RawRow], is_whole: bool = True) -> None:
    """Refuse a file of which no row could be read: it is of another kind than its name says.

    Args:
        name: what to call it.
        rows: all of them, or the first.
        is_whole: whether they are all.

    Raises:
        DataError: says what is wrong with the first row.
    """
    if not rows:
        raise DataError(f"{name} holds no rows")
    if any(row.value is not None for row in rows):
        return
    first = rows[0]
    start = first.raw.strip()
    # An opening bracket alone, or a list of rows on one line.
    hint = ONE_TEXT if start in ("{", "[") or start.startswith("[{") else "Write one JSON object a line, as UTF-8"
    why = first.finding.detail if first.finding else "it is empty"
    one = len(rows) == 1 and is_whole
    what = "its only row" if one else f"none of its {'' if is_whole else 'first '}{len(rows)} rows"
    raise DataError(f"{name}: {what} could {'not ' if one else ''}be read; row {first.number}: {why}. {hint}")


def detect(
    name: str,
    sample: Sequence[dict[str, Any]],
    kinds: Collection[Kind] = PAIRS_ONLY,
    wanted: str = "auto",
    *,
    where: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> FormatEvidence:
    """Return the format of rows that could be read, with the evidence for it.

    A format is a candidate when at least `CLEAR_SHARE` of the rows have its structure. One that refines another wins
    over it. If several are left, or none, nobody but the user knows.

    Args:
        name: what to call the file in the evidence.
        sample: rows without their null columns.
        kinds: what the rows may become.
        wanted: the format that the config names, or `auto`.
        where: what to call the file in messages. Default: the name.
        options: see `identify`.

    Raises:
        ConfigurationError: there is no such format for these kinds, or `label` or `score` is missing, unknown, or
            means nothing to the format.
        DataError: no row could be read, no known format fits, several do, or one of another kind does.
    """
    where = where or name
    if not sample:
        raise DataError(f"{where}: no row could be read, so its format is unknown")
    if wanted == "auto":
        chosen = _choose(where, sample, kinds)
    else:
        allowed = [known.name for known in FORMATS.values() if known.kind in kinds]
        if wanted not in allowed:
            raise ConfigurationError(f"{where}: format {wanted} is unknown here; allowed: auto, {', '.join(allowed)}")
        chosen = FORMATS[wanted]
    check_options(where, chosen, options or {})
    counted = Counter(column for value in sample for column in value)
    frequent = sorted(counted, key=lambda column: (-counted[column], column))[:MAX_COLUMNS]
    shown = shown_names(sorted(frequent))
    columns = {shown[column]: counted[column] for column in shown}
    evidence = (["named in the config"] if wanted != "auto" else []) + _evidence(chosen, sample)
    unused = [text for column, text in shown.items() if column not in chosen.columns]
    decided_by = "columns" if wanted == "auto" else "config"
    return FormatEvidence(name, chosen.name, decided_by, evidence, columns, unused, chosen.kind)


def check_options(where: str, chosen: Format, options: Mapping[str, Any]) -> None:
    """Refuse a `label` or `score` that a format does not know, and a missing `label` where several may disagree.

    Raises:
        ConfigurationError: says what is allowed.
    """
    for option, allowed in (("label", chosen.labels), ("score", chosen.scores)):
        given = options.get(option)
        if given is None:
            if option == "label" and allowed:
                choices = " or ".join(f"label: {name}" for name in allowed)
                raise ConfigurationError(
                    f"{where}: rows of format {chosen.name} hold {len(allowed)} judgements that may disagree. Write "
                    f"{choices} beside its path"
                )
        elif not allowed:
            raise ConfigurationError(
                f"{where}: {option}: {given} means nothing to format {chosen.name}, which has one {option}: remove it"
            )
        elif given not in allowed:
            raise ConfigurationError(
                f"{where}: {option}: {given} is unknown to format {chosen.name}; allowed: {', '.join(allowed)}"
            )


def _choose(where: str, sample: Sequence[dict[str, Any]], kinds: Collection[Kind]) -> Format:
    fitting = {known.name: sum(map(known.fits, sample)) for known in FORMATS.values()}
    enough = [known for known in FORMATS.values() if fitting[known.name] >= CLEAR_SHARE * len(sample)]
    candidates = _most_specific([known for known in enough if known.kind in kinds])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        told = "; ".join(f"{known.name} ({'; '.join(_evidence(known, sample))})" for known in candidates)
        raise DataError(f"{where}: the format is ambiguous: {told}. {_write(candidates)}")
    # A prompt with an answer is a prompt, too: rows that lack their judgement do not make a file one of prompts.
    likely = _most_specific([k for k in FORMATS.values() if k.kind in kinds and 2 * fitting[k.name] > len(sample)])
    if len(likely) == 1 and enough and all(known.kind == "prompts" for known in enough):
        return likely[0]
    found = f"columns found: {name_columns({column for value in sample for column in value})}"
    if elsewhere := _most_specific(enough):
        known = elsewhere[0]
        raise DataError(
            f"{where}: the rows are of format {known.name} ({known.summary}), which belongs in {PLACES[known.kind]}; "
            f"{found}"
        )
    partly = [known for known in FORMATS.values() if known.kind in kinds and fitting[known.name]]
    if partly:
        shares = ", ".join(f"{known.name} fits {fitting[known.name]}" for known in partly)
        raise DataError(
            f"{where}: the format is ambiguous: of {len(sample)} sampled rows, {shares}; {found}. If the others are "
            f"bad rows: {_write(partly)}; if the file mixes formats, split it"
        )
    raise DataError(
        f"{where}: {_nearest(sample, kinds)}; {found}. Rename the columns, or write `format:` beside its path"
    )


def _most_specific(candidates: Sequence[Format]) -> list[Format]:
    """Return the candidates that no other one refines."""
    refined = {general for known in candidates for general in known.refines}
    return [known for known in candidates if known.name not in refined]


def _write(candidates: Sequence[Format]) -> str:
    choices = [f"format: {known.name} ({known.summary})" for known in candidates]
    return f"Write {' or '.join(choices)} beside its path"


def _evidence(known: Format, sample: Sequence[dict[str, Any]]) -> list[str]:
    total = len(sample)
    found = []
    if known.needs:
        complete = sum(all(column in value for column in known.needs) for value in sample)
        found.append(f"{complete} of {total} sampled rows have {_listed(known.needs)}")
    found += [f"{sum(map(sign.shows, sample))} of {total} sampled rows {sign.words}" for sign in known.signs]
    others = [value for value in sample if not known.fits(value)]
    if not others:
        return found
    found.append(f"{len(others)} of {total} sampled rows do not have this structure")
    counted = {other: sum(map(other.fits, others)) for other in FORMATS.values()}
    mixed = {other: number for other, number in counted.items() if number and other.name not in known.refines}
    for other in _most_specific(list(mixed)):
        found.append(f"{mixed[other]} of these have that of {other.name}: the file may mix formats")
    return found


def _listed(columns: Sequence[str]) -> str:
    return " and ".join([", ".join(columns[:-1]), columns[-1]] if len(columns) > 1 else columns)


def _nearest(sample: Sequence[dict[str, Any]], kinds: Collection[Kind]) -> str:
    """Return which known formats come closest, and what they lack."""
    columns = {column for value in sample for column in value}
    if {"chosen", "rejected"} <= columns and "prompt" not in columns and "pairs" in kinds:
        first = next((value for value in sample if "chosen" in value and "rejected" in value), {})
        if isinstance(first.get("chosen"), str) and isinstance(first.get("rejected"), str):
            return NO_PROMPT
    if columns & {"chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids"}:
        return TOKEN_IDS
    near = _near([known for known in FORMATS.values() if known.kind in kinds], columns)
    told = [_lacking(known, columns, "") for known in near]
    if not told:
        near = _near([known for known in FORMATS.values() if known.kind not in kinds], columns)
        told = [_lacking(known, columns, f", which belongs in {PLACES[known.kind]},") for known in near]
    if told:
        return f"no known format fits. Nearest: {'; '.join(told)}"
    every = [f"{known.name} ({known.summary})" for known in FORMATS.values() if known.kind in kinds]
    return f"no known format fits. Known: {'; '.join(every)}"


def _near(formats: Sequence[Format], columns: Collection[str]) -> list[Format]:
    """Return the formats of which some needed columns are there, those that lack the smallest share first."""
    shares = [
        (sum(need not in columns for need in known.needs) / len(known.needs), known) for known in formats if known.needs
    ]
    return [known for share, known in sorted(shares, key=lambda item: item[0]) if share < 1][:MAX_NEAREST]


def _lacking(known: Format, columns: Collection[str], place: str) -> str:
    missing = [column for column in known.needs if column not in columns]
    if missing:
        return f"{known.name}{place} lacks {', '.join(missing)}"
    return f"{known.name}{place} has other types ({known.summary})"
