"""Rows of several answers in an order of preference, which become pairs: the widest gaps first, up to a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError
from data_checks.formats.markers import prompt_of_transcript
from data_checks.formats.turns import extra_of, json_text, number_of, refuse_media, source_of, text_of
from data_checks.rows import Dropped, PairRow, Policy, RawRow, Reason, Turn, Turns, kind_of

MAX_ANSWERS = 100
"""Most answers of one row: 4,950 pairs. Rows in the wild have up to about forty."""
Candidate = tuple[float, int, int]
"""Gap, place of the better answer, place of the other one; gap 0: neither is better, and the earlier one is first."""


def ranked_candidates(worth: Sequence[float]) -> list[Candidate]:
    """Return every pair of answers, the widest gaps first, then in the row's order.

    Args:
        worth: of each answer, higher is better.

    Returns:
        One tie where all answers are worth the same: more would say nothing more.

    >>> ranked_candidates([1, 3, 3])
    [(2, 1, 0), (2, 2, 0), (0, 1, 2)]
    """
    found = []
    for i, j in combinations(range(len(worth)), 2):
        better, other = (j, i) if worth[j] > worth[i] else (i, j)
        found.append((worth[better] - worth[other], better, other))
    found.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
    return found if found and found[0][0] else found[:1]


def pairs_of(
    row: RawRow,
    options: Options,
    prompt: Turns,
    texts: Sequence[str],
    candidates: Sequence[Candidate],
    extra: Callable[[int, int], str],
) -> list[Result]:
    """Return the first pairs up to the cap, and an account of each further one.

    Args:
        row: they come from.
        options: of its file.
        prompt: of all answers.
        texts: of the answers.
        candidates: in the order in which they are taken.
        extra: what no field holds, of the pair of two places.
    """
    source = _source(row, options)
    answers = [(Turn("assistant", text),) for text in texts]
    results: list[Result] = [
        PairRow(row, source, prompt, answers[i], prompt, answers[j], is_tie=gap == 0, extra=extra(i, j))
        for gap, i, j in candidates[: options.max_pairs_per_row]
    ]
    dropped = Dropped(Policy.PAIRS_PER_ROW, f"max_pairs_per_row: {options.max_pairs_per_row}")
    return results + [dropped] * (len(candidates) - len(results))


def _source(row: RawRow, options: Options) -> str:
    """Return the row's source; several in a list are joined by `+`."""
    value = row.value or {}
    named = value.get("source")
    if isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        return "+".join(named)
    return source_of(value, options.source)


def objects_of(value: dict[str, Any], column: str) -> list[dict[str, Any]]:
    items = value.get(column)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RowError(f"{column} is {kind_of(items)}, not a list of objects")
    if len(items) < 2:
        raise RowError(f"{column} has {len(items)} of the at least two answers that a comparison needs")
    _refuse_many(items, column)
    return items


def _refuse_many(items: Sequence[Any], column: str) -> None:
    """Refuse more answers than anyone ranks: each two of them would be a pair."""
    if len(items) > MAX_ANSWERS:
        raise RowError(f"{column} has {len(items)} answers, at most {MAX_ANSWERS} are read", Reason.ROW_TOO_LARGE)


def holds_objects(value: dict[str, Any], column: str, key: str) -> bool:
    items = value.get(column)
    return isinstance(items, list) and bool(items) and all(isinstance(item, dict) and key in item for item in items)


def _refuse_other_count(value: dict[str, Any], column: str, number: int) -> None:
    """Refuse a row that says it has more or fewer answers than it has: some are lost, or were added."""
    if column in value and number_of(value[column], column) != number:
        raise RowError(f"{column} does not say how many answers the row holds, {number}")


NECTAR_COLUMNS = frozenset(("prompt", "answers", "num_responses", "source"))


def _convert_nectar(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    answers = objects_of(value, "answers")
    _refuse_other_count(value, "num_responses", len(answers))
    refuse_media(value)
    ranks = [number_of(answer.get("rank"), f"answers[{index}].rank") for index, answer in enumerate(answers)]
    texts = [text_of(answer, "answer") for answer in answers]
    rest = {name: item for name, item in value.items() if name not in NECTAR_COLUMNS}
    others = [{name: item for name, item in answer.items() if name not in ("answer", "rank")} for answer in answers]

    def extra(i: int, j: int) -> str:
        own = {"chosen_answer": {**others[i], "rank": ranks[i]}, "rejected_answer": {**others[j], "rank": ranks[j]}}
        return json_text({**rest, **own}, "the other columns")

    prompt = prompt_of_transcript(text_of(value, "prompt"))
    # Rank 1 is the best.
    return pairs_of(row, options, prompt, texts, ranked_candidates([-rank for rank in ranks]), extra)


NECTAR = Format(
    name="nectar",
    kind="pairs",
    summary="prompt (a Human/Assistant transcript or text), answers (list of {answer, rank}; 1 is best, equal: a tie)",
    columns=NECTAR_COLUMNS,
    fits=lambda value: isinstance(value.get("prompt"), str) and holds_objects(value, "answers", "rank"),
    convert=_convert_nectar,
    label_kind="ranked",
    needs=("prompt", "answers"),
)

REWARDBENCH2_NEEDS = ("prompt", "chosen", "rejected")
REWARDBENCH2_COUNTS = ("num_correct", "num_incorrect", "total_completions")
REWARDBENCH2_COLUMNS = frozenset((*REWARDBENCH2_NEEDS, *REWARDBENCH2_COUNTS, "source"))


def _texts(value: dict[str, Any], column: str) -> list[str]:
    texts = value.get(column)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        what = "an empty list" if texts == [] else kind_of(texts)
        raise RowError(f"{column} is {what}, not a list of texts")
    _refuse_many(texts, column)
    return texts


def _convert_rewardbench2(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    correct, incorrect = _texts(value, "chosen"), _texts(value, "rejected")
    counts = (len(correct), len(incorrect), len(correct) + len(incorrect))
    for column, number in zip(REWARDBENCH2_COUNTS, counts, strict=True):
        _refuse_other_count(value, column, number)
    refuse_media(value)
    places = product(range(len(correct)), range(len(correct), counts[2]))
    # Any correct answer is better than any other by the same: take different ones before the same one again.
    candidates: list[Candidate] = [(1, i, j) for i, j in sorted(places, key=lambda place: (sum(place), place))]
    if _is_ties_subset(value):
        candidates += [(0, i, j) for i, j in combinations(range(len(correct)), 2)]
    extra = extra_of(value, REWARDBENCH2_COLUMNS)
    prompt = (Turn("user", text_of(value, "prompt")),)
    return pairs_of(row, options, prompt, [*correct, *incorrect], candidates, lambda _i, _j: extra)


def _is_ties_subset(value: dict[str, Any]) -> bool:
    """Return whether the row's correct answers are declared equally good."""
    subset, name = value.get("subset"), value.get("id")
    return (isinstance(subset, str) and subset.lower() == "ties") or (
        isinstance(name, str) and name.startswith(("tied:", "ref:"))
    )


def _fits_rewardbench2(value: dict[str, Any]) -> bool:
    sides = value.get("chosen"), value.get("rejected")
    return isinstance(value.get("prompt"), str) and all(
        isinstance(side, list) and bool(side) and all(isinstance(text, str) for text in side) for side in sides
    )


REWARDBENCH2 = Format(
    name="rewardbench2",
    kind="pairs",
    summary="prompt, chosen and rejected as lists of texts: every one of the first is better; subset Ties: and equal",
    columns=REWARDBENCH2_COLUMNS,
    fits=_fits_rewardbench2,
    convert=_convert_rewardbench2,
    label_kind="ranked",
    needs=REWARDBENCH2_NEEDS,
)
