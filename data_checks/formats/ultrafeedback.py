"""UltraFeedback as published by OpenBMB: four answers a row, each rated on several scales by a model."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.ranked import holds_objects, objects_of, pairs_of, ranked_candidates
from data_checks.formats.turns import json_text, number_of, refuse_media, text_of
from data_checks.rows import PairRow, RawRow, Reason, Turn

ASPECTS = ("helpfulness", "honesty", "instruction_following", "truthfulness")
SCALES = {
    "overall_score": (1.0, 10.0),
    "fine-grained_score": (1.0, 5.0),
    **dict.fromkeys(ASPECTS, (1.0, 5.0)),
}
"""What `score` may be -> the lowest and the highest rating there is."""
NOT_RATED = "N/A"
WRONG_TEN = 3.0
"""With a fine-grained score below this, the middle of its scale, an overall score of 10 is doubtful: in a part of the
published rows 1 was stored as 10 (issue 8 of OpenBMB/UltraFeedback)."""
COLUMNS = frozenset(("instruction", "completions", "source"))


def _convert(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    completions = objects_of(value, "completions")
    refuse_media(value)
    score = options.score or "overall_score"
    rated = [
        (index, completion, rating)
        for index, completion in enumerate(completions)
        if (rating := rating_of(completion, score, f"completions[{index}]")) is not None
    ]
    if len(rated) < 2:
        detail = f"{len(rated)} of {len(completions)} answers have a rating ({score}): two are compared"
        raise RowError(detail, Reason.MISSING_JUDGEMENT)
    rest = {name: item for name, item in value.items() if name not in COLUMNS}
    rest |= {"num_unrated": len(completions) - len(rated)} if len(rated) < len(completions) else {}
    kept = [_kept(completion) for _, completion, _ in rated]
    texts = [text_of(completion, "response") for _, completion, _ in rated]
    ratings = [rating for _, _, rating in rated]

    def extra(i: int, j: int) -> str:
        return json_text({**rest, "chosen_answer": kept[i], "rejected_answer": kept[j]}, "the other columns")

    prompt = (Turn("user", text_of(value, "instruction")),)
    candidates = ranked_candidates(ratings)
    results = pairs_of(row, options, prompt, texts, candidates, extra)
    for result, (_, i, j) in zip(results, candidates, strict=True):
        if isinstance(result, PairRow):
            fine = tuple(_fine(kept[place]) for place in (i, j))
            result.chosen_score, result.rejected_score = _shown(score, (ratings[i], ratings[j]), fine)
    return results


def _shown(score: str, ratings: tuple[float, float], fine: tuple[float | None, ...]) -> tuple[float, float]:
    """Return the scores that later checks see: the fine-grained ones where an overall score of 10 is doubtful.

    The order of the pair stays that of the overall scores. So a pair that a wrong 10 turned round has a chosen score
    below the rejected one, which the checks count.
    """
    first, second = fine
    if score == "overall_score" and first is not None and second is not None:
        highest = SCALES[score][1]
        if (ratings[0] == highest and first < WRONG_TEN) or (ratings[1] == highest and second < WRONG_TEN):
            return first, second
    return ratings


def _fine(kept: dict[str, Any]) -> float | None:
    """Return the fine-grained score, None where there is no number: another scale counts, so it may be anything."""
    try:
        return number_of(kept.get("fine-grained_score"), "fine-grained_score")
    except RowError:
        return None


def rating_of(completion: dict[str, Any], score: str, where: str) -> float | None:
    """Return an answer's rating, None where it has none.

    Args:
        completion: the answer.
        score: one of `SCALES`. An aspect is rated once, or several times, which are averaged.
        where: the answer, for messages.

    Raises:
        RowError: it is no number and no text of one, or out of its scale.
    """
    if score not in ASPECTS:
        return _rating(completion.get(score), score, f"{where}.{score}")
    annotations = completion.get("annotations")
    aspect = annotations.get(score) if isinstance(annotations, dict) else None
    several = aspect if isinstance(aspect, list) else [aspect]
    ratings = [
        rating
        for item in several
        if isinstance(item, dict) and (rating := _rating(item.get("Rating"), score, f"{where}.{score}")) is not None
    ]
    return sum(ratings) / len(ratings) if ratings else None


def _rating(item: Any, score: str, where: str) -> float | None:
    if item is None or item == NOT_RATED:
        return None
    if isinstance(item, str):
        try:
            item = float(item)
        except ValueError:
            raise RowError(f"{where} is a text that is neither a number nor {NOT_RATED}") from None
    rating = number_of(item, where)
    lowest, highest = SCALES[score]
    if not lowest <= rating <= highest:
        raise RowError(f"{where} is out of range; allowed: {lowest:g} to {highest:g}")
    return rating


def _kept(completion: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of an answer beside its text: who wrote it under which system prompt, and every rating.

    Ratings are kept as they stand in the file: only those of the scale that counts are judged.
    """
    names = ("model", "custom_system_prompt", "overall_score", "fine-grained_score")
    kept = {name: completion[name] for name in names if completion.get(name) is not None}
    annotations = completion.get("annotations")
    for aspect in ASPECTS:
        several = annotations.get(aspect) if isinstance(annotations, dict) else None
        if isinstance(several, dict):
            kept[aspect] = several.get("Rating")
        elif isinstance(several, list):
            kept[aspect] = [item.get("Rating") for item in several if isinstance(item, dict)]
    return kept


def _fits(value: dict[str, Any]) -> bool:
    return isinstance(value.get("instruction"), str) and holds_objects(value, "completions", "response")


def _has_text_ratings(value: dict[str, Any]) -> bool:
    return any(isinstance(completion, dict) and "annotations" in completion for completion in value["completions"])


ULTRAFEEDBACK = Format(
    name="ultrafeedback",
    kind="pairs",
    summary="instruction, completions (list of {response, overall_score, fine-grained_score, annotations})",
    columns=COLUMNS,
    fits=_fits,
    convert=_convert,
    scores=tuple(SCALES),
    label_kind="ranked",
    needs=("instruction", "completions"),
    signs=(Sign("have answers with annotations", lambda value: _fits(value) and _has_text_ratings(value)),),
)
