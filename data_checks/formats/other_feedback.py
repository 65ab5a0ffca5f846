"""Answers judged one by one: logged thumbs and ratings, TRL's unpaired rows, HelpSteer2's attributes."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.turns import (
    as_turns,
    extra_of,
    number,
    number_of,
    refuse_media,
    source_of,
    text_of,
    tools_of,
    without_prompt,
)
from data_checks.naming import name_columns
from data_checks.rows import FeedbackRow, RawRow, Turn, kind_of

ANSWER_COLUMNS = ("completion", "response", "answer")
JUDGEMENTS = ("label", "thumb", "rating", "average_rating")
THUMBS = {"up": True, "down": False}
FEEDBACK_COLUMNS = frozenset({"prompt", *ANSWER_COLUMNS, *JUDGEMENTS, "source", "annotator", "tools"})
ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
HIGHEST_ATTRIBUTE = 4.0


def fits_feedback(value: dict[str, Any]) -> bool:
    """Return whether a row is one answer to a prompt.

    `answer` counts with a judgement beside it only: without one it is as often what a verifier compares with.
    """
    if not isinstance(value.get("prompt"), str | list) or "chosen" in value or "rejected" in value:
        return False
    named = [column for column in ANSWER_COLUMNS if column in value]
    if len(named) != 1 or not isinstance(value[named[0]], str | list):
        return False
    return named != ["answer"] or any(column in value for column in JUDGEMENTS)


def feedback_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the judged answer of a row.

    Args:
        row: with a value.
        options: `rating_threshold`: ratings from here on are good, for rows without another judgement.

    Raises:
        RowError: it holds none.
    """
    value = row.value or {}
    named = [column for column in ANSWER_COLUMNS if column in value]
    if "prompt" not in value or not named:
        missing = "answer (completion, response or answer)" if "prompt" in value else "prompt"
        raise RowError(f"no {missing}; columns: {name_columns(value)}")
    if len(named) > 1:
        raise RowError(f"{' and '.join(named)} are both there: which one was judged is unknown")
    refuse_media(value)
    prompt, answer = without_prompt(value["prompt"], as_turns(value[named[0]], named[0], "assistant"))
    used = {"prompt", named[0], "label", "thumb", "rating", "source", "tools"}
    rating = number(value, ("rating",))
    if rating is None and is_number(value.get("average_rating")):
        rating = number_of(value["average_rating"], "average_rating")
        used.add("average_rating")
    label = labelled(_label(value), rating, options)
    judged = FeedbackRow(row, source_of(value, options.source), prompt, answer, label, rating)
    if isinstance(value.get("annotator"), str):
        judged.annotator = value["annotator"]
        used.add("annotator")
    judged.tools = tools_of(value)
    judged.extra = extra_of(value, used)
    return [judged]


def labelled(label: bool | None, rating: float | None, options: Options) -> bool | None:
    """Return the label, or what the config says of the rating where there is none."""
    if label is None and rating is not None and options.rating_threshold is not None:
        return rating >= options.rating_threshold
    return label


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(value: dict[str, Any]) -> bool | None:
    label, thumb = value.get("label"), value.get("thumb")
    if type(label) is int and label in (0, 1):
        label = bool(label)  # How many tables write false and true.
    if label is not None and not isinstance(label, bool):
        raise RowError(f"label is {kind_of(label)}, not true or false")
    if thumb is None:
        return label
    if not isinstance(thumb, str) or thumb not in THUMBS:
        what = "another text" if isinstance(thumb, str) else kind_of(thumb)
        raise RowError(f"thumb is {what}, not up or down")
    if label is not None and label != THUMBS[thumb]:
        raise RowError("label and thumb contradict each other")
    return THUMBS[thumb]


def fits_helpsteer2(value: dict[str, Any]) -> bool:
    texts = isinstance(value.get("prompt"), str) and isinstance(value.get("response"), str)
    return texts and all(is_number(value.get(attribute)) for attribute in ATTRIBUTES)


def helpsteer2_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the answer of a HelpSteer2 row, rated by the attribute that `options.score` names.

    Raises:
        RowError: it holds none, or the rating is outside the data set's scale, 0 to 4.
    """
    value = row.value or {}
    attribute = options.score or ATTRIBUTES[0]
    prompt, answer = Turn("user", text_of(value, "prompt")), Turn("assistant", text_of(value, "response"))
    rating = number(value, (attribute,))
    if rating is not None and not 0.0 <= rating <= HIGHEST_ATTRIBUTE:
        raise RowError(f"{attribute} is out of range; allowed: 0 to {HIGHEST_ATTRIBUTE:.0f}")
    label = labelled(None, rating, options)
    extra = extra_of(value, ("prompt", "response", "source", attribute))
    return [FeedbackRow(row, source_of(value, options.source), (prompt,), (answer,), label, rating, extra=extra)]


FEEDBACK = Format(
    name="feedback",
    kind="feedback",
    summary="prompt, one of completion, response and answer, and label (true or false), thumb (up or down), rating or "
    "average_rating; texts or messages (TRL's unpaired rows)",
    columns=FEEDBACK_COLUMNS,
    fits=fits_feedback,
    convert=feedback_rows,
    refines=frozenset({"prompts"}),
    label_kind="unpaired",
    needs=("prompt",),
    signs=(
        Sign("have one of completion, response and answer", lambda value: any(c in value for c in ANSWER_COLUMNS)),
        Sign("have label", lambda value: "label" in value),
        Sign("have thumb", lambda value: "thumb" in value),
        Sign("have rating or average_rating", lambda value: "rating" in value or "average_rating" in value),
    ),
)

HELPSTEER2 = Format(
    name="helpsteer2",
    kind="feedback",
    summary="prompt, response, and helpfulness, correctness, coherence, complexity and verbosity from 0 to 4, of which "
    "`score` names the rating",
    columns=frozenset({"prompt", "response", "source", *ATTRIBUTES}),
    fits=fits_helpsteer2,
    convert=helpsteer2_rows,
    refines=frozenset({"feedback", "prompts"}),
    scores=ATTRIBUTES,
    label_kind="unpaired",
    needs=("prompt", "response", *ATTRIBUTES),
)
