"""Prompts alone, for RL and evaluation: our own rows, verl's and OpenRLHF's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError
from data_checks.formats.turns import MEDIA_COLUMNS, as_turns, extra_of, json_text, refuse_media, tools_of
from data_checks.keys import exact_prompt_id
from data_checks.naming import name_columns
from data_checks.rows import Finding, PromptItem, RawRow, Reason, Turns, kind_of

GROUND_TRUTH = "ground_truth"
PROMPT_COLUMNS = frozenset(
    {"prompt", "prompt_id", GROUND_TRUTH, "reference", "data_source", "ability", "tools", "source"}
)
ANSWERS_TO_COMPARE = (
    *("chosen", "rejected", "response_0", "response_1", "response_2", "response1", "response2"),
    *("chosen_messages", "rejected_messages"),
)
NOT_BESIDE_INPUT = frozenset(
    {"prompt", "instruction", "output", "completion", "response", "messages", "conversations", *ANSWERS_TO_COMPARE}
)


def fits_prompts(value: dict[str, Any]) -> bool:
    """Return whether a row has a prompt and no answers to compare; what else there is may be for the rewards."""
    if not isinstance(value.get("prompt"), str | list) or any(column in value for column in ANSWERS_TO_COMPARE):
        return False
    answers = value.get("answers")
    return not (isinstance(answers, list) and answers and isinstance(answers[0], dict))


def prompt_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the prompt of a row, with the other columns as `extra`.

    Raises:
        RowError: it holds none.
    """
    value = row.value or {}
    if "prompt" not in value:
        raise RowError(f"no prompt; columns: {name_columns(value)}")
    refuse_media(value)
    truth = value.get(GROUND_TRUTH, value.get("reference"))
    return [_item(row, as_turns(value["prompt"], "prompt", "user"), value, ("prompt",), truth, options)]


def _item(
    row: RawRow, prompt: Turns, value: Mapping[str, Any], used: tuple[str, ...], truth: Any, options: Options
) -> PromptItem:
    prompt_id = value.get("prompt_id")
    if prompt_id is None:
        prompt_id = exact_prompt_id(prompt)
    elif not isinstance(prompt_id, str) or not prompt_id.strip():
        raise RowError(f"prompt_id is {kind_of(prompt_id)}, not a text that names the prompt")
    item = PromptItem(row, prompt, prompt_id, extra_of(value, (*used, "prompt_id")))
    item.source = _text(value, "source") or options.source
    item.data_source, item.ability = _text(value, "data_source"), _text(value, "ability")
    item.tools = _tools(value)
    if truth is not None:
        text = json_text(truth, "the ground truth")
        item.ground_truth = None if text == "null" else text  # NaN is how tables write that there is none.
    return item


def _text(value: Mapping[str, Any], column: str) -> str | None:
    """Return a column where it is a text; whatever it is, `extra` has it too."""
    found = value.get(column)
    return found if isinstance(found, str) else None


def _tools(value: Mapping[str, Any]) -> str | None:
    """Return the tools on offer; a column of that name that holds none is for the rewards, in `extra`."""
    try:
        return tools_of(value) if "tools" in value else None
    except RowError:
        return None


def fits_verl(value: dict[str, Any]) -> bool:
    return (
        isinstance(value.get("prompt"), list)
        and isinstance(value.get("data_source"), str)
        and isinstance(value.get("reward_model"), dict)
    )


def verl_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the prompt of a verl row; `extra` has all other columns, and the plain `ground_truth` by that name.

    Raises:
        RowError: it holds none, or pictures and videos.
    """
    value = row.value or {}
    for column, kind in (("prompt", list), ("reward_model", dict)):
        if not isinstance(value.get(column), kind):
            what = "a list of messages" if column == "prompt" else "an object with style and ground_truth"
            raise RowError(f"{column} is {kind_of(value.get(column))}, not {what}")
    refuse_media(value)
    model = value["reward_model"]
    truth = model.get(GROUND_TRUTH)
    item = _item(
        row, as_turns(value["prompt"], "prompt", "user"), _with_truth(value, truth), ("prompt",), truth, options
    )
    if truth is None and model.get("style") == "rule":
        detail = "reward_model has no ground_truth, though its style says that a rule compares with one"
        item.findings.append(Finding(Reason.GOLD_REJECTED, detail))
    return [item]


def _with_truth(value: dict[str, Any], truth: Any) -> dict[str, Any]:
    """Return the row with the ground truth by its own name, under which rewards read it."""
    if truth is None:
        return value
    if value.get(GROUND_TRUTH, truth) != truth:
        raise RowError("the column ground_truth and the one that the format reads contradict each other")
    return {**value, GROUND_TRUTH: truth}


def fits_openrlhf(value: dict[str, Any]) -> bool:
    return isinstance(value.get("input"), str | list) and NOT_BESIDE_INPUT.isdisjoint(value)


def openrlhf_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the prompt of an OpenRLHF row; `extra` has all other columns, and `label` also as `ground_truth`.

    Raises:
        RowError: it holds none.
    """
    value = row.value or {}
    if "input" not in value:
        raise RowError(f"no input; columns: {name_columns(value)}")
    refuse_media(value)
    truth = value.get("label")
    item = _item(row, as_turns(value["input"], "input", "user"), _with_truth(value, truth), ("input",), truth, options)
    item.data_source = item.data_source or _text(value, "datasource")
    return [item]


PROMPTS = Format(
    name="prompts",
    kind="prompts",
    summary="prompt (text or messages); prompt_id and columns for the rewards may be there",
    columns=PROMPT_COLUMNS,
    fits=fits_prompts,
    convert=prompt_rows,
    needs=("prompt",),
    label_kind="rl_prompt",
)

VERL = Format(
    name="verl",
    kind="prompts",
    summary="data_source, prompt (messages), reward_model {style, ground_truth}; ability and extra_info may be there",
    columns=frozenset(
        {"data_source", "prompt", "ability", "reward_model", "extra_info", "prompt_id", "tools", *MEDIA_COLUMNS}
    ),
    fits=fits_verl,
    convert=verl_rows,
    needs=("data_source", "prompt", "reward_model"),
    refines=frozenset({"prompts"}),
    label_kind="rl_prompt",
)

OPENRLHF_PROMPTS = Format(
    name="openrlhf_prompts",
    kind="prompts",
    summary="input (text or messages); label (what a verifier compares with) may be there",
    columns=frozenset({"input", "label", "datasource", "data_source", "prompt_id", "tools", *MEDIA_COLUMNS}),
    fits=fits_openrlhf,
    convert=openrlhf_rows,
    needs=("input",),
    label_kind="rl_prompt",
)
