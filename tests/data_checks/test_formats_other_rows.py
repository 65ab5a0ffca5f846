"""Rows of formats without pairs: what each becomes, and which are not what their format says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_checks.formats.base import Options, RowError
from data_checks.formats.other_formats import OTHER_FORMATS
from data_checks.gold import GoldChecker
from data_checks.pass_rates import PassRates
from data_checks.rows import FeedbackRow, PromptItem, RawRow, Reason, StepwiseRow
from data_checks.rules import feedback_findings

BY_NAME = {one.name: one for one in OTHER_FORMATS}


def convert(name: str, row: dict[str, Any], **options: Any) -> Any:
    value = {key: item for key, item in row.items() if item is not None}
    (result,) = BY_NAME[name].convert(RawRow("f", 1, "", value), Options("f", **options))
    return result


def refusal(name: str, row: dict[str, Any]) -> str:
    with pytest.raises(RowError) as caught:
        convert(name, row)
    assert caught.value.finding.reason == Reason.WRONG_TYPE
    return caught.value.finding.detail


def roles(turns: Any) -> list[str]:
    return [f"{turn.role}: {turn.content}" for turn in turns]


USER = [{"role": "user", "content": "Hi"}]
ANSWER = [{"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "label", "rating"),
    [
        ({"prompt": "Hi", "completion": "Hello", "label": True}, True, None),
        ({"prompt": "Hi", "response": "Hello", "label": False}, False, None),
        ({"prompt": "Hi", "answer": "Hello", "thumb": "up"}, True, None),
        ({"prompt": USER, "completion": ANSWER, "thumb": "down"}, False, None),
        ({"prompt": USER, "answer": "Hello", "rating": 3}, None, 3.0),
        ({"prompt": USER, "answer": USER + ANSWER, "rating": -0.5, "label": True}, True, -0.5),
        ({"prompt": "Hi", "answer": USER + ANSWER, "thumb": "up", "label": True}, True, None),
        ({"prompt": "Hi", "answer": "Hello"}, None, None),
        # argilla's variant; a rating that is no number is somebody else's column.
        ({"prompt": "Hi", "completion": USER + ANSWER, "label": True, "average_rating": 4.75}, True, 4.75),
        ({"prompt": "Hi", "completion": ANSWER, "label": True, "average_rating": "N/A"}, True, None),
        ({"prompt": "Hi", "completion": ANSWER, "rating": 1, "average_rating": 2.0}, None, 1.0),
    ],
)
def test_feedback(row: dict[str, Any], label: bool | None, rating: float | None) -> None:
    found = convert("feedback", row)
    assert isinstance(found, FeedbackRow)
    assert (roles(found.prompt), roles(found.answer)) == (["user: Hi"], ["assistant: Hello"])
    assert (found.label, found.rating, found.source) == (label, rating, "f")
    assert convert("feedback", {**row, "source": "app"}).source == "app"


def test_nothing_of_feedback_is_lost() -> None:
    row = {
        "prompt": "Hi",
        "completion": "Hello",
        "label": True,
        "average_rating": 4.5,
        "annotator": "ann",
        "model": "m",
    }
    row |= {"annotations": {"honesty": {"Rating": "5"}}, "tools": [{"name": "search"}]}
    found = convert("feedback", row)
    assert (found.annotator, json.loads(found.tools)) == ("ann", [{"name": "search"}])
    assert json.loads(found.extra) == {"annotations": {"honesty": {"Rating": "5"}}, "model": "m"}
    other = convert("feedback", {**row, "annotator": 7, "rating": 2})
    assert other.annotator is None
    assert json.loads(other.extra) == json.loads(found.extra) | {"annotator": 7, "average_rating": 4.5}


@pytest.mark.parametrize(
    ("judgement", "label"),
    [
        ({"rating": 4}, True),
        ({"rating": 3.9}, False),
        ({"rating": 1, "label": True}, True),
        ({"rating": 5, "thumb": "down"}, False),
        ({"average_rating": 4.5}, True),
    ],
)
def test_a_threshold_labels_only_what_has_no_label(judgement: dict[str, Any], label: bool) -> None:
    row = {"prompt": "Hi", "answer": "Hello", **judgement}
    assert convert("feedback", row, rating_threshold=4.0).label is label


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"label": 2}, "label is a number, not true or false"),
        ({"label": "true"}, "label is text, not true or false"),
        ({"thumb": "Up"}, "thumb is another text, not up or down"),
        ({"thumb": True}, "thumb is true or false, not up or down"),
        ({"thumb": "down", "label": True}, "label and thumb contradict each other"),
        ({"rating": "5"}, "rating is text, not a number"),
        ({"rating": True}, "rating is true or false, not a number"),
        ({"rating": 10**400}, "rating is not finite"),
        ({"answer": "x"}, "completion and answer are both there: which one was judged is unknown"),
        ({"completion": None}, "no answer (completion, response or answer); columns: label, prompt"),
        ({"prompt": None}, "no prompt; columns: completion, label"),
        ({"source": 3}, "source is a number, not text"),
        ({"images": ["a.png"]}, "images is not empty: only text is used, and it would be lost"),
    ],
)
def test_what_is_no_feedback(fields: dict[str, Any], detail: str) -> None:
    assert refusal("feedback", {"prompt": "Hi", "completion": "Hello", "label": True, **fields}) == detail


STEER: dict[str, Any] = {"prompt": "Hi", "response": "Hello"}
STEER |= {"helpfulness": 3, "correctness": 4, "coherence": 4, "complexity": 0, "verbosity": 1}


def test_helpsteer2() -> None:
    found = convert("helpsteer2", STEER, rating_threshold=3.0)
    assert (found.label, found.rating) == (True, 3.0)
    assert json.loads(found.extra) == {
        key: STEER[key] for key in ("correctness", "coherence", "complexity", "verbosity")
    }
    chosen = convert("helpsteer2", STEER, score="verbosity")
    assert (chosen.label, chosen.rating) == (None, 1.0)
    assert json.loads(chosen.extra)["helpfulness"] == 3
    # Each name that the format offers is one that it reads.
    for score in BY_NAME["helpsteer2"].scores:
        assert convert("helpsteer2", STEER, score=score).rating == STEER[score]
    unjudged = convert("helpsteer2", {**STEER, "helpfulness": None})
    assert [finding.reason for finding in feedback_findings(unjudged)] == [Reason.MISSING_JUDGEMENT]
    assert refusal("helpsteer2", {**STEER, "helpfulness": 10}) == "helpfulness is out of range; allowed: 0 to 4"
    assert refusal("helpsteer2", {**STEER, "response": ["Hello"]}) == "response is a list, not text"


TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def test_llama_factory_kto() -> None:
    found = convert("llama_factory_kto", {"conversations": TALK, "kto_tag": False, "system": "Be kind.", "topic": "t"})
    assert (roles(found.prompt), roles(found.answer)) == (["system: Be kind.", "user: Hi"], ["assistant: Hello"])
    assert (found.label, json.loads(found.extra)) == (False, {"topic": "t"})
    found = convert("llama_factory_kto", {"messages": USER + ANSWER, "label": True, "tools": "[]", "images": []})
    assert (roles(found.prompt), found.label, found.tools, found.extra) == (["user: Hi"], True, "[]", "{}")
    observed = [*TALK, {"from": "observation", "value": "{}"}, {"from": "gpt", "value": "Done"}]
    found = convert("llama_factory_kto", {"conversations": observed, "kto_tag": True})
    assert roles(found.prompt)[1:] == ["assistant: Hello", "tool: {}"]


def test_a_label_that_judges_nothing_is_kept_beside_a_tag() -> None:
    found = convert("llama_factory_kto", {"conversations": TALK, "kto_tag": True, "label": "greeting"})
    assert (found.label, json.loads(found.extra)) == (True, {"label": "greeting"})


def test_a_system_column_beside_a_system_turn_is_kept() -> None:
    talk = [{"from": "system", "value": "Be brief."}, *TALK]
    found = convert("llama_factory_kto", {"conversations": talk, "kto_tag": True, "system": "Be kind."})
    assert roles(found.prompt) == ["system: Be brief.", "user: Hi"]
    assert json.loads(found.extra) == {"system": "Be kind."}


def test_content_in_parts() -> None:
    def part(role: str, weight: float, *texts: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": text} for text in texts], "loss_weight": weight}

    row: dict[str, Any] = {"messages": [part("user", 0.0, "H", "i"), part("assistant", 1.0, "Hello")], "label": True}
    found = convert("llama_factory_kto", row)
    assert (roles(found.prompt), roles(found.answer)) == (["user: Hi"], ["assistant: Hello"])
    assert json.loads(found.extra) == {"messages_loss_weights": [0.0, 1.0]}
    row["messages"][0]["content"].append({"type": "image_url", "value": "a.png"})
    assert "is no text" in refusal("llama_factory_kto", row)


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"kto_tag": True}, "not one of messages and conversations; columns: kto_tag"),
        ({"conversations": TALK, "messages": USER, "label": True}, "not one of messages and conversations; columns: "),
        ({"messages": "Hi", "label": True}, "messages is text, not a list of messages"),
        ({"messages": USER + ANSWER, "label": 1}, "label is a number, not true or false"),
        ({"messages": USER + ANSWER, "kto_tag": "true"}, "kto_tag is text, not true or false"),
        ({"messages": USER + ANSWER, "kto_tag": True, "label": False}, "kto_tag and label contradict each other"),
        ({"messages": USER + ANSWER, "label": True, "videos": ["a.mp4"]}, "videos is not empty"),
        ({"messages": [{"role": "wizard", "content": "x"}], "label": True}, "messages[0] has an unknown role"),
    ],
)
def test_what_is_no_kto_row(row: dict[str, Any], detail: str) -> None:
    assert refusal("llama_factory_kto", row).startswith(detail)


def test_a_kto_row_without_a_judgement() -> None:
    findings = feedback_findings(convert("llama_factory_kto", {"messages": USER + ANSWER}))
    assert [finding.reason for finding in findings] == [Reason.MISSING_JUDGEMENT]


def test_llama_factory_alpaca_kto() -> None:
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2", "kto_tag": True, "system": "Be brief."}
    found = convert("llama_factory_alpaca_kto", {**row, "history": [["Hi", "Hello"]], "topic": "t"})
    assert roles(found.prompt) == ["system: Be brief.", "user: Hi", "assistant: Hello", "user: Add.\n1 + 1"]
    assert (roles(found.answer), found.label, json.loads(found.extra)) == (["assistant: 2"], True, {"topic": "t"})
    plain = convert("llama_factory_alpaca_kto", {**row, "input": "", "system": "", "history": [], "kto_tag": False})
    assert (roles(plain.prompt), plain.label) == (["user: Add."], False)
    assert "not true or false" in refusal("llama_factory_alpaca_kto", {**row, "kto_tag": "yes"})
    assert refusal("llama_factory_alpaca_kto", {**row, "output": ["2"]}) == "output is a list, not text"
    assert "history[0]" in refusal("llama_factory_alpaca_kto", {**row, "history": [["Hi"]]})


def test_prompts() -> None:
    row = {"prompt": "Hi", "prompt_id": "q1", "source": "app", "topic": {"b": 1, "a": [True]}, "reference": "Hello"}
    found = convert("prompts", row)
    assert isinstance(found, PromptItem)
    assert (roles(found.prompt), found.prompt_id, found.source) == (["user: Hi"], "q1", "app")
    assert json.loads(found.extra) == {key: row[key] for key in ("source", "topic", "reference")}
    assert (found.ground_truth, found.tools, found.data_source) == ('"Hello"', None, None)
    bare = convert("prompts", {"prompt": USER})
    assert (bare.extra, bare.source, bare.ground_truth) == ("{}", "f", None)
    assert (
        bare.prompt_id
        == convert("prompts", {"prompt": "Hi"}).prompt_id
        != convert("prompts", {"prompt": "hi"}).prompt_id
    )
    assert convert("prompts", {"prompt": "Hi", "ground_truth": float("nan")}).ground_truth is None
    kept = convert("prompts", {"prompt": "Hi", "tools": "hammer", "source": 3})
    assert (kept.tools, kept.source, json.loads(kept.extra)) == (None, "f", {"tools": "hammer", "source": 3})


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"text": "Hi"}, "no prompt; columns: text"),
        ({"prompt": 3}, "prompt is a number, not text or a list of messages"),
        ({"prompt": "Hi", "prompt_id": 3}, "prompt_id is a number, not a text that names the prompt"),
        ({"prompt": "Hi", "prompt_id": " "}, "prompt_id is text, not a text that names the prompt"),
        ({"prompt": "Hi", "images": ["a.png"]}, "images is not empty: only text is used, and it would be lost"),
        ({"prompt": "Hi", "score": float("inf")}, "the other columns cannot be written as JSON"),
    ],
)
def test_what_is_no_prompt(row: dict[str, Any], detail: str) -> None:
    assert refusal("prompts", row).startswith(detail)


@pytest.mark.parametrize("truth", ["8", 8, 2.5, True, ["a", "b"], {"target": 24, "numbers": [1, 2]}, '{"inputs": []}'])
def test_verl(truth: Any) -> None:
    from training_core.data.prompts import parse_extra

    row: dict[str, Any] = {"data_source": "openai/gsm8k", "prompt": USER, "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": {"index": 3}}
    found = convert("verl", row)
    assert (found.data_source, found.ability, json.loads(found.ground_truth)) == ("openai/gsm8k", "math", truth)
    rest = {key: item for key, item in row.items() if key != "prompt"}
    # As rewards read it: by name, as the value that the file holds.
    assert parse_extra(found.extra, "id", Path("f")) == rest | {"ground_truth": truth}
    assert found.findings == []


def test_verl_without_a_ground_truth() -> None:
    row = {"data_source": "own", "prompt": USER, "reward_model": {"style": "rule", "ground_truth": None}}
    assert [finding.reason for finding in convert("verl", row).findings] == [Reason.GOLD_REJECTED]
    judged = convert("verl", {**row, "reward_model": {"style": "model"}})
    assert (judged.findings, judged.ground_truth, "ground_truth" in json.loads(judged.extra)) == ([], None, False)


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"prompt": "Hi"}, "prompt is text, not a list of messages"),
        ({"reward_model": "rule"}, "reward_model is text, not an object with style and ground_truth"),
        ({"reward_model": None}, "reward_model is null or missing, not an object"),
        ({"images": [{"bytes": "x"}]}, "images is not empty"),
        ({"videos": ["a"]}, "videos is not empty"),
        ({"ground_truth": "9"}, "the column ground_truth and the one that the format reads contradict each other"),
    ],
)
def test_what_is_no_verl_row(fields: dict[str, Any], detail: str) -> None:
    row = {"data_source": "own", "prompt": USER, "reward_model": {"style": "rule", "ground_truth": "8"}}
    assert convert("verl", {**row, "images": [], "ground_truth": "8"}).ground_truth == '"8"'
    assert refusal("verl", {**row, **fields}).startswith(detail)


def test_openrlhf_prompts() -> None:
    found = convert("openrlhf_prompts", {"input": "Hi", "label": ["a"], "datasource": "own"})
    assert (roles(found.prompt), json.loads(found.ground_truth), found.data_source) == (["user: Hi"], ["a"], "own")
    assert json.loads(found.extra) == {"label": ["a"], "ground_truth": ["a"], "datasource": "own"}
    alone = convert("openrlhf_prompts", {"input": USER})
    assert (roles(alone.prompt), alone.ground_truth, alone.extra) == (["user: Hi"], None, "{}")
    assert refusal("openrlhf_prompts", {"label": "x"}) == "no input; columns: label"
    assert refusal("openrlhf_prompts", {"input": "x", "images": ["a"]}).startswith("images is not empty")


def test_stepwise() -> None:
    row = {"prompt": "Add.", "completions": ["First.", "Then."], "labels": [True, False], "source": "s", "n": 1}
    found = convert("stepwise", row)
    assert isinstance(found, StepwiseRow)
    assert (roles(found.prompt), roles(found.answer)) == (["user: Add."], ["assistant: First.", "assistant: Then."])
    assert (found.labels, found.source, json.loads(found.extra)) == ((True, False), "s", {"n": 1})
    assert roles(convert("stepwise", {**row, "prompt": USER}).prompt) == ["user: Hi"]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"labels": [True]}, "2 completions and 1 labels: each step needs one"),
        ({"labels": [True, 2]}, "labels[1] is a number, not true or false"),
        ({"labels": True}, "labels is true or false, not a list"),
        ({"labels": None}, "no labels; columns: completions, prompt"),
        ({"completions": ["a", None]}, "completions[1] is null or missing, not text"),
        ({"completions": "a"}, "completions is text, not a list"),
        ({"prompt": 1}, "prompt is a number, not text or a list of messages"),
    ],
)
def test_what_is_no_stepwise_row(fields: dict[str, Any], detail: str) -> None:
    row = {"prompt": "Add.", "completions": ["First.", "Then."], "labels": [True, False]}
    assert refusal("stepwise", {**row, **fields}) == detail


texts = st.sampled_from(["", "yes", "Hi", "#### 3", "\\frac{", "😀"])
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), st.none(), st.integers()),
            "from": st.sampled_from(["human", "gpt", "y"]),
            "content": st.one_of(texts, st.none(), st.lists(st.dictionaries(st.sampled_from(["type", "text"]), texts))),
            "value": st.one_of(texts, st.booleans()),
            "loss_weight": st.floats(),
        },
    ),
    max_size=3,
)
cells = st.one_of(
    texts,
    messages,
    st.booleans(),
    st.integers(-1, 10**30),
    st.floats(),
    st.lists(st.one_of(texts, st.booleans(), st.lists(texts, max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from(["style", "ground_truth"]), st.one_of(texts, st.none(), st.floats()), max_size=2),
)
COLUMNS = sorted({column for known in OTHER_FORMATS for column in known.columns} | {"other", "pass_rate"})


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.dictionaries(st.sampled_from(COLUMNS), cells, max_size=8))
def test_any_row_becomes_an_example_or_a_finding(value: dict[str, Any]) -> None:
    reasons: set[Reason] = set()
    for known in OTHER_FORMATS:
        fits = known.fits(value)
        assert isinstance(fits, bool)
        try:
            results = known.convert(RawRow("f", 1, "", value), Options("f"))
        except RowError as error:
            reasons.add(error.finding.reason)
            continue
        (result,) = results
        assert isinstance(result, FeedbackRow | PromptItem | StepwiseRow)
        json.loads(result.extra)
        if isinstance(result, PromptItem):
            PassRates().add([result])
            assert len(GoldChecker(math_share=0.0).findings([result])) == 1
    assert reasons <= {Reason.WRONG_TYPE, Reason.PROMPT_MISMATCH}
