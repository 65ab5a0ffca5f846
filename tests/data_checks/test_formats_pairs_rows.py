"""Rows with a trap: what is refused and what is a tie. No message quotes a value."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from pair_fixtures import convert, load, plain, refusal

from data_checks.detection import detect
from data_checks.rows import PairRow, Reason
from data_checks.rules import pair_findings
from training_core.errors import ConfigurationError

TRUE_RANK = [{"answer": "a", "rank": 1}, {"answer": "b", "rank": True}]
WRONG = [
    ("summarize", {"choice": 2}, "choice is out of range; allowed: 0 to 1"),
    ("summarize", {"choice": True}, "choice is true or false, not a number"),
    ("summarize", {"choice": "1"}, "choice is text, not a number"),
    ("summarize", {"choice": 0.5}, "choice is no whole number"),
    ("summarize", {"choice": None}, "choice is null or missing, not a number"),
    ("summarize", {"summaries": [{"text": "one"}]}, "not a list of two"),
    ("summarize", {"summaries": [{"text": "one"}, {"note": "two"}]}, "a summary has no text"),
    ("summarize", {"info": "a secret post"}, "info is text, not an object"),
    ("summarize", {"info": {"title": "alone"}}, "info has neither a post nor an article"),
    ("summarize", {"info": {"post": "text", "title": 3}}, "info.title is a number, not text"),
    ("summarize", {"worker": True}, "worker is true or false"),
    ("webgpt", {"score_0": 0.5, "score_1": 0.5}, "contradict each other"),
    ("webgpt", {"score_0": 2, "score_1": -2}, "out of range; allowed: -1 to 1"),
    ("webgpt", {"score_0": float("nan")}, "score_0 is not finite"),
    ("webgpt", {"score_1": None}, "score_1 is null or missing"),
    ("webgpt", {"answer_1": ["a list"]}, "answer_1 is a list, not text"),
    ("webgpt", {"question": {"id": "only"}}, "question has no full_text"),
    ("shp", {"labels": True}, "labels is true or false, not a number"),
    ("shp", {"labels": -1}, "labels is out of range"),
    ("shp", {"score_A": "12"}, "score_A is text, not a number"),
    ("shp", {"human_ref_B": None}, "human_ref_B is null or missing, not text"),
    ("safe_rlhf", {"better_response_id": 2}, "better_response_id is out of range"),
    ("safe_rlhf", {"better_response_id": False}, "better_response_id is true or false"),
    ("helpsteer2_preference", {"preference_strength": 4}, "preference_strength is out of range; allowed: -3 to 3"),
    ("helpsteer2_preference", {"prompt": None}, "no prompt"),
    ("helpsteer3", {"overall_preference": 0.5}, "overall_preference is no whole number"),
    ("helpsteer3", {"context": [{"role": "narrator", "content": "x"}]}, "context[0] has an unknown role"),
    ("nectar", {"num_responses": 9}, "num_responses does not say how many answers the row holds, 7"),
    ("nectar", {"answers": [{"answer": "a", "rank": 1}]}, "answers has 1 of the at least two answers"),
    ("nectar", {"answers": TRUE_RANK, "num_responses": 2}, "answers[1].rank is true or"),
    ("nectar", {"answers": [{"answer": "a", "rank": 1}, {"rank": 2}], "num_responses": 2}, "answer is null or missing"),
    ("nectar", {"answers": "text"}, "answers is text, not a list of objects"),
    ("rewardbench2", {"rejected": []}, "rejected is an empty list, not a list of texts"),
    ("rewardbench2", {"chosen": ["a", 3]}, "chosen is a list, not a list of texts"),
    ("rewardbench2", {"num_correct": 2}, "num_correct does not say how many answers the row holds, 1"),
    ("rewardbench2", {"total_completions": 5}, "total_completions does not say how many answers the row holds, 4"),
    # LLaMA-Factory itself takes an answer that is no text for no answer, and trains on nothing.
    ("llama_factory_alpaca", {"chosen": ["a list"]}, "chosen is a list, not text"),
    ("llama_factory_alpaca", {"history": [["question"]]}, "history[0] is not a question and an answer"),
    ("llama_factory_alpaca", {"history": "earlier"}, "history is text, not a list"),
    ("llama_factory_alpaca", {"system": 3}, "system is a number, not text"),
    ("llama_factory_sharegpt", {"chosen": "text"}, "chosen is text, not a message"),
    ("llama_factory_sharegpt", {"chosen": {"from": "gpt"}}, "chosen has null or missing as value"),
    ("llama_factory_sharegpt", {"conversations": {"from": "human"}}, "conversations is an object, not a list"),
    ("llama_factory_sharegpt", {"images": ["a.png"]}, "images is not empty"),
    ("trl_standard", {"images": ["a.png"]}, "images is not empty: only text is used"),
    ("trl_standard", {"margin": True}, "margin is true or false"),
    ("trl_standard", {"tools": "no JSON"}, "tools is a text that is no JSON"),
    ("trl_standard", {"tools": 3}, "tools is a number, not JSON text or a list"),
    ("trl_standard", {"other": float("inf")}, "the other columns cannot be written as JSON: a number is infinite"),
    ("trl_standard", {"prompt": None}, "no prompt, and chosen is a text: nothing tells where the answer starts"),
    ("hh", {"rejected": ["a list"]}, "rejected is a list, not a transcript text"),
]
FORMATS = {"trl_standard": "pairs"}


@pytest.mark.parametrize(("name", "fields", "detail"), WRONG, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG)])
def test_what_is_refused(name: str, fields: dict[str, Any], detail: str) -> None:
    value = {key: item for key, item in {**load(name)[0], **fields}.items() if item is not None}
    options = {"label": "helpful"} if name == "safe_rlhf" else {}
    found = refusal(value, FORMATS.get(name, name), **options)
    assert detail in found
    assert not any(text in found for text in ("secret", "a.png", "narrator", "no JSON;"))


def test_numbers_with_gaps_in_a_table_are_whole() -> None:
    value = load("shp")[1]
    pair = convert({**value, "labels": 0.0}, "shp")[0]
    assert pair.chosen_position == 2


def test_a_label_against_the_scores_is_left_for_the_checks() -> None:
    pair = convert({**load("shp")[0], "labels": 0}, "shp")[0]
    assert (pair.chosen_score, pair.rejected_score, pair.is_tie) == (3.0, 12.0, False)


def test_the_judgement_that_counts_must_be_named() -> None:
    rows = load("safe_rlhf")
    for call in (lambda: detect("f", rows), lambda: convert(rows[0], "safe_rlhf")):
        with pytest.raises(ConfigurationError, match=r"helpful.*safe"):
            call()
    with pytest.raises(
        ConfigurationError, match="label: harmless is unknown to format safe_rlhf; allowed: helpful, safe"
    ):
        detect("f", rows, options={"label": "harmless"})
    with pytest.raises(ConfigurationError, match="label: safe means nothing to format hh, which has one label"):
        detect("f", load("hh"), options={"label": "safe"})
    with pytest.raises(
        ConfigurationError, match="score: taste is unknown to format ultrafeedback; allowed: overall_score"
    ):
        detect("f", load("ultrafeedback"), wanted="ultrafeedback", options={"score": "taste"})
    assert detect("f", rows, options={"label": "safe"}).format == "safe_rlhf"


# Comments say what a common converter makes of such rows.
BLUE, BLACK = "The sky is blue", "The sky is black"


def test_texts_are_never_cut_where_their_characters_stop_being_equal() -> None:
    refused = "nothing tells where the answer starts"
    # A word cut in two; one letter left on each side; an exception; a blank answer; the last word on both sides.
    pairs = [(BLUE, BLACK), ("same text", "same text"), ("", "x"), ("Hello. ", "Bye"), ("Yes", "Yes, and more")]
    for chosen, rejected in pairs:
        assert refused in refusal({"chosen": chosen, "rejected": rejected}, "pairs")
        pair = convert({"prompt": "p", "chosen": chosen, "rejected": rejected}, "pairs")[0]
        assert (pair.chosen[0].content, pair.rejected[0].content) == (chosen, rejected)


def test_messages_that_differ_from_the_first_turn_are_a_mismatch() -> None:
    # An empty prompt, and the user's turn as part of the answer.
    ask = [{"role": "user", "content": word} for word in ("a", "b")]
    answer = {"role": "assistant", "content": "c"}
    pair = convert({"chosen": [ask[0], answer], "rejected": [ask[1], {**answer, "content": "d"}]}, "pairs")[0]
    assert plain(pair.prompt) == (("user", "a"),)
    assert [finding.reason for finding in pair_findings(pair)] == [Reason.PROMPT_MISMATCH]


def test_a_side_of_another_length_is_not_sliced_by_the_other() -> None:
    # The rejected side cut at the chosen prompt's length.
    chosen = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "good"}]
    rejected = [{"role": "user", "content": "a, please"}, {"role": "assistant", "content": "bad"}]
    pair = convert({"chosen": chosen, "rejected": rejected}, "pairs")[0]
    assert plain(pair.rejected) == (("assistant", "bad"),)
    assert Reason.PROMPT_MISMATCH in [finding.reason for finding in pair_findings(pair)]


def test_empty_sides_are_findings() -> None:
    pair = convert({"chosen": [], "rejected": []}, "pairs")[0]
    assert Reason.LAST_TURN_NOT_ASSISTANT in [finding.reason for finding in pair_findings(pair)]


def test_transcripts_after_a_prompt_of_their_own() -> None:
    prompt = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    expected = (("user", "a"), ("assistant", "b"), ("user", "c"))
    for rest in ("", " "):
        pair = convert({"prompt": prompt + rest, "chosen": " d", "rejected": "e"}, "hh")[0]
        assert plain(pair.prompt) == expected
        # One space belongs to the marker, a second one to the text.
        assert (pair.chosen[0].content, pair.rejected[0].content) == (rest + "d", "e")
    whole = convert({"prompt": prompt, "chosen": prompt + " d", "rejected": prompt + " e"}, "hh")[0]
    assert plain(whole.prompt) == expected
    other = {"prompt": "\n\nHuman: z\n\nAssistant:", "chosen": prompt + " d", "rejected": prompt + " e"}
    assert "do not go on from the prompt" in refusal(other, "hh", Reason.PROMPT_MISMATCH)
    # Beside whole transcripts, a prompt that is none is kept, not used.
    kept = convert({"prompt": "a note", "chosen": prompt + " d", "rejected": prompt + " e"}, "hh")[0]
    assert json.loads(kept.extra) == {"prompt": "a note"}
    marked = convert({"prompt": prompt, "chosen": " d\n\nHuman: e", "rejected": " f"}, "hh")[0]
    assert plain(marked.chosen) == (("user", "e"),)


def test_a_turn_after_the_shared_text_is_a_turn_of_one_side() -> None:
    base = "\n\nHuman: a\n\nAssistant: b"
    for more in ("\n\nHuman: c", "\n\nHuman: c\n\nAssistant: d", "\n\nAssistant: d"):
        for chosen, rejected in ((base, base + more), (base + more, base)):
            pair = convert({"chosen": chosen, "rejected": rejected}, "hh")[0]
            assert len(pair.chosen_prompt) == (1 if chosen == base else 1 + more.count(":"))
            assert len(pair.rejected_prompt) == (1 if rejected == base else 1 + more.count(":"))
            expected = Reason.LAST_TURN_NOT_ASSISTANT if more == "\n\nHuman: c" else Reason.PROMPT_MISMATCH
            assert expected in [finding.reason for finding in pair_findings(pair)]


def test_markers_of_other_templates_stay_text() -> None:
    pair = convert(load("helpsteer2_preference")[3], "helpsteer2_preference")[0]
    assert [turn.role for turn in pair.prompt] == ["user"]
    assert "<extra_id_1>" in pair.prompt[0].content


def test_repeated_judgements_of_one_post_stay_apart() -> None:
    first, second = (convert(value, "summarize")[0] for value in load("summarize")[:2])
    assert first.prompt == second.prompt
    assert (first.chosen, first.annotator, second.rejected, second.annotator) == (
        second.rejected,
        "w1",
        first.chosen,
        "w2",
    )


def test_messages_beside_a_binarized_pair_are_kept_where_they_are_others() -> None:
    value = copy.deepcopy(load("ultrafeedback_binarized")[0])
    value["messages"][1]["content"] = "Another answer."
    pair = convert(value, "ultrafeedback_binarized")[0]
    assert isinstance(pair, PairRow)
    assert json.loads(pair.extra)["messages"][1]["content"] == "Another answer."


def test_a_conversation_and_both_sides_of_v1_rows() -> None:
    value = load("llama_factory_v1")[0]
    image = copy.deepcopy(value)
    image["chosen_messages"][0]["content"].append({"type": "image_url", "value": "a.png"})
    found = refusal(image, "llama_factory_sharegpt")
    assert "chosen_messages[0].content[1] is no text" in found
    parts = copy.deepcopy(value)
    parts["chosen_messages"][1]["content"].append({"type": "text", "value": " More."})
    assert convert(parts, "llama_factory_sharegpt")[0].chosen[0].content == "Seven minutes for a firm yolk. More."
    messages = {
        "messages": [{"role": "user", "content": "a"}],
        **{side: {"role": "assistant", "content": side} for side in ("chosen", "rejected")},
    }
    assert detect("f", [messages]).format == "llama_factory_sharegpt"
    assert plain(convert(messages, "llama_factory_sharegpt")[0].chosen) == (("assistant", "chosen"),)
