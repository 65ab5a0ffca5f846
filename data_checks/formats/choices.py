"""Two answers side by side and a label that says which one is better: an index, a sign, a score each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError, Sign
from data_checks.formats.turns import (
    NO_EXTRA,
    as_turns,
    extra_of,
    integer,
    json_text,
    number_of,
    refuse_media,
    source_of,
    text_of,
    tools_of,
)
from data_checks.rows import PairRow, RawRow, Turn, Turns, kind_of
from training_core.errors import ConfigurationError

SAFE_LABELS = {"helpful": "better_response_id", "safe": "safer_response_id"}
"""What `label` says -> the column that then counts."""
WEBGPT_TOLERANCE = 1e-6
"""Both scores of a WebGPT row are one number and its negative, up to rounding."""
SUMMARY_PARTS = (("subreddit", "SUBREDDIT: r/"), ("title", "TITLE: "), ("post", "POST: "), ("article", "ARTICLE: "))
SUMMARY_END = "TL;DR:"
"""The prompt of a summary is these parts, as far as `info` has them, and this end, with a blank line between: what
OpenAI's TL;DR data asks. The texts themselves stand in it unchanged."""
COMMON = ("source", "tools")
"""Columns that mean the same in every format."""


def pair_of(
    row: RawRow,
    value: Mapping[str, Any],
    options: Options,
    prompt: Turns,
    answers: tuple[str, str],
    best: int | None,
    extra: str,
) -> PairRow:
    """Return the pair of two answers.

    Args:
        row: they come from.
        value: of the row.
        options: of its file.
        prompt: of both.
        answers: in the file's order.
        best: 0 or 1, the preferred one; None: neither is, and the first stands as chosen.
        extra: the columns that no field holds.
    """
    chosen = 1 if best == 1 else 0
    return PairRow(
        row,
        source_of(value, options.source),
        prompt,
        (Turn("assistant", answers[chosen]),),
        prompt,
        (Turn("assistant", answers[1 - chosen]),),
        is_tie=best is None,
        chosen_position=None if best is None else best + 1,
        tools=tools_of(value),
        extra=extra,
    )


def _rest(value: dict[str, Any], used: Collection[str]) -> str:
    refuse_media(value)
    return NO_EXTRA if value.keys() <= set(used) else extra_of(value, used)


def _has(value: dict[str, Any], texts: Collection[str], others: Collection[str] = ()) -> bool:
    return all(isinstance(value.get(name), str) for name in texts) and all(name in value for name in others)


SUMMARIZE_NEEDS = ("info", "summaries", "choice")
SUMMARIZE_COLUMNS = frozenset((*SUMMARIZE_NEEDS, "worker", *COMMON))


def _convert_summarize(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    info, summaries = value.get("info"), value.get("summaries")
    if not isinstance(info, dict):
        raise RowError(f"info is {kind_of(info)}, not an object with post and title")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise RowError(f"summaries is {kind_of(summaries)}, not a list of two")
    if not all(isinstance(summary, dict) and isinstance(summary.get("text"), str) for summary in summaries):
        raise RowError("a summary has no text")
    best = integer(value, "choice", 0, 1)
    prompt, used = _summary_prompt(info)
    rest = {name: item for name, item in value.items() if name not in SUMMARIZE_COLUMNS}
    rest["info"] = {name: item for name, item in info.items() if name not in used and item is not None}
    rest["summaries"] = [
        {name: item for name, item in summary.items() if name != "text" and item is not None} for summary in summaries
    ]
    texts = (summaries[0]["text"], summaries[1]["text"])
    pair = pair_of(row, value, options, (Turn("user", prompt),), texts, best, json_text(rest, "the other columns"))
    pair.annotator = _worker(value.get("worker"))
    return [pair]


def _summary_prompt(info: dict[str, Any]) -> tuple[str, set[str]]:
    """Return the prompt as `SUMMARY_PARTS` has it, and the names of the parts that it holds."""
    if info.get("post") is None and info.get("article") is None:
        raise RowError("info has neither a post nor an article")
    parts, used = [], set()
    for name, words in SUMMARY_PARTS:
        text = info.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise RowError(f"info.{name} is {kind_of(text)}, not text")
            parts.append(words + text)
            used.add(name)
    return "\n\n".join([*parts, SUMMARY_END]), used


def _worker(worker: Any) -> str | None:
    if worker is not None and (isinstance(worker, bool) or not isinstance(worker, str | int)):
        raise RowError(f"worker is {kind_of(worker)}, not a name or a number")
    return None if worker is None else str(worker)


SUMMARIZE = Format(
    name="summarize",
    kind="pairs",
    summary="info (post, title, subreddit or article), summaries (two of {text, policy}), choice (0 or 1), worker",
    columns=SUMMARIZE_COLUMNS,
    fits=lambda value: (
        isinstance(value.get("info"), dict) and isinstance(value.get("summaries"), list) and "choice" in value
    ),
    convert=_convert_summarize,
    needs=SUMMARIZE_NEEDS,
    signs=(Sign("name the worker who judged", lambda value: "worker" in value),),
)

WEBGPT_NEEDS = ("question", "answer_0", "answer_1", "score_0", "score_1")
WEBGPT_COLUMNS = frozenset((*WEBGPT_NEEDS, *COMMON))


def _convert_webgpt(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    question = value.get("question")
    text = question.get("full_text") if isinstance(question, dict) else question
    if not isinstance(text, str):
        raise RowError("question has no full_text")
    scores = [number_of(value.get(name), name) for name in ("score_0", "score_1")]
    if max(map(abs, scores)) > 1:
        raise RowError("score_0 or score_1 is out of range; allowed: -1 to 1")
    if abs(sum(scores)) > WEBGPT_TOLERANCE:
        raise RowError("score_0 and score_1 contradict each other: one is the other's negative")
    best = None if scores[0] == scores[1] else int(scores[1] > scores[0])
    rest = {name: item for name, item in value.items() if name not in WEBGPT_COLUMNS}
    if isinstance(question, dict) and len(question) > 1:
        rest["question"] = {name: item for name, item in question.items() if name != "full_text"}
    answers = (text_of(value, "answer_0"), text_of(value, "answer_1"))
    pair = pair_of(row, value, options, (Turn("user", text),), answers, best, json_text(rest, "the other columns"))
    pair.chosen_score, pair.rejected_score = max(scores), min(scores)
    return [pair]


WEBGPT = Format(
    name="webgpt",
    kind="pairs",
    summary="question {full_text}, answer_0, answer_1, score_0, score_1 (-1 to 1, one the other's negative; 0: a tie)",
    columns=WEBGPT_COLUMNS,
    fits=lambda value: _has(value, ("answer_0", "answer_1"), ("question", "score_0", "score_1")),
    convert=_convert_webgpt,
    needs=WEBGPT_NEEDS,
)

SHP_NEEDS = ("history", "human_ref_A", "human_ref_B", "labels")
SHP_COLUMNS = frozenset((*SHP_NEEDS, "score_A", "score_B", *COMMON))


def _convert_shp(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    best = 1 - integer(value, "labels", 0, 1)
    names = ("score_A", "score_B")
    scores = [number_of(value[name], name) if name in value else None for name in names]
    answers = (text_of(value, "human_ref_A"), text_of(value, "human_ref_B"))
    is_tie = scores[0] is not None and scores[0] == scores[1]
    prompt = (Turn("user", text_of(value, "history")),)
    pair = pair_of(row, value, options, prompt, answers, None if is_tie else best, _rest(value, SHP_COLUMNS))
    pair.chosen_score, pair.rejected_score = (scores[0], scores[1]) if is_tie else (scores[best], scores[1 - best])
    return [pair]


SHP = Format(
    name="shp",
    kind="pairs",
    summary="history, human_ref_A, human_ref_B, labels (1: A is better, 0: B), score_A, score_B (equal: a tie)",
    columns=SHP_COLUMNS,
    fits=lambda value: _has(value, SHP_NEEDS[:3], SHP_NEEDS[3:]),
    convert=_convert_shp,
    needs=SHP_NEEDS,
)

SAFE_NEEDS = ("prompt", "response_0", "response_1", "better_response_id", "safer_response_id")


def _convert_safe(row: RawRow, options: Options) -> list[Result]:
    value = row.value or {}
    column = SAFE_LABELS.get(options.label or "")
    if column is None:
        raise ConfigurationError(f"format safe_rlhf needs label; allowed: {', '.join(SAFE_LABELS)}")
    used = ("prompt", "response_0", "response_1", column, *COMMON)
    answers = (text_of(value, "response_0"), text_of(value, "response_1"))
    best = integer(value, column, 0, 1)
    prompt = (Turn("user", text_of(value, "prompt")),)
    return [pair_of(row, value, options, prompt, answers, best, _rest(value, used))]


SAFE_RLHF = Format(
    name="safe_rlhf",
    kind="pairs",
    summary="prompt, response_0, response_1, better_response_id, safer_response_id (0 or 1; label says which counts)",
    columns=frozenset((*SAFE_NEEDS, *COMMON)),
    fits=lambda value: _has(value, SAFE_NEEDS[:3], SAFE_NEEDS[3:]),
    convert=_convert_safe,
    labels=tuple(SAFE_LABELS),
    needs=SAFE_NEEDS,
)


def _by_strength(
    row: RawRow, options: Options, columns: tuple[str, str, str, str], used: frozenset[str]
) -> list[Result]:
    """Return the pair of a row whose strength, -3 to 3, is negative where the first answer is better."""
    value = row.value or {}
    asked, first, second, strength_column = columns
    strength = integer(value, strength_column, -3, 3)
    if asked not in value:
        raise RowError(f"no {asked}")
    prompt = as_turns(value[asked], asked, "user")
    answers = (text_of(value, first), text_of(value, second))
    best = None if strength == 0 else int(strength > 0)
    pair = pair_of(row, value, options, prompt, answers, best, _rest(value, used))
    pair.margin = float(abs(strength))
    return [pair]


HELPSTEER2_NEEDS = ("prompt", "response_1", "response_2", "preference_strength")
HELPSTEER2_COLUMNS = frozenset((*HELPSTEER2_NEEDS, *COMMON))
HELPSTEER2_PREFERENCE = Format(
    name="helpsteer2_preference",
    kind="pairs",
    summary="prompt, response_1, response_2, preference_strength (-3 to 3; negative: response_1 is better, 0: a tie)",
    columns=HELPSTEER2_COLUMNS,
    fits=lambda value: _has(value, HELPSTEER2_NEEDS[:3], HELPSTEER2_NEEDS[3:]),
    convert=lambda row, options: _by_strength(row, options, HELPSTEER2_NEEDS, HELPSTEER2_COLUMNS),
    needs=HELPSTEER2_NEEDS,
)
HELPSTEER3_NEEDS = ("context", "response1", "response2", "overall_preference")
HELPSTEER3_COLUMNS = frozenset((*HELPSTEER3_NEEDS, *COMMON))
HELPSTEER3 = Format(
    name="helpsteer3",
    kind="pairs",
    summary="context (messages), response1, response2, overall_preference (-3 to 3; negative: response1, 0: a tie)",
    columns=HELPSTEER3_COLUMNS,
    fits=lambda value: _has(value, HELPSTEER3_NEEDS[1:3], ("context", "overall_preference")),
    convert=lambda row, options: _by_strength(row, options, HELPSTEER3_NEEDS, HELPSTEER3_COLUMNS),
    needs=HELPSTEER3_NEEDS,
)
