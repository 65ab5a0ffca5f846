"""Logged thumbs and ratings: what a row may look like, which are used, and on which side of the split they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_checking import Loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_checks.formats import parse_feedback
from data_checks.keys import group_id
from data_checks.rows import FeedbackRow, Finding, RawRow
from training_core.errors import DataError


def feedback(number: int = 40, start: int = 0) -> list[dict[str, Any]]:
    """Flawless rows with different prompts: good and bad labels in turn."""
    return [
        {"prompt": f"Tell me about {i}.", "completion": f"It is {i}.", "label": i % 2 == 0}
        for i in range(start, start + number)
    ]


def parse(row: dict[str, Any], rating_threshold: float | None = None) -> FeedbackRow | Finding:
    return parse_feedback(RawRow("f", 1, "", row), "f", rating_threshold)


@pytest.fixture
def check_feedback(check: Any, write_rows: Any) -> Callable[..., Loaded]:
    """Check rows of feedback alone; keywords are config fields."""

    def run(rows: list[Any], **fields: Any) -> Loaded:
        path = write_rows(rows, "feedback.jsonl")
        data: Loaded = check(feedback=[{"path": str(path)}], **fields)
        return data

    return run


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
    ],
)
def test_what_a_row_may_look_like(row: dict[str, Any], label: bool | None, rating: float | None) -> None:
    found = parse(row)
    assert isinstance(found, FeedbackRow)
    assert [turn._asdict() for turn in found.prompt] == USER
    assert [turn._asdict() for turn in found.answer] == ANSWER
    assert (found.label, found.rating, found.source) == (label, rating, "f")
    named = parse({**row, "source": "app"})
    assert isinstance(named, FeedbackRow)
    assert named.source == "app"


@pytest.mark.parametrize(
    ("judgement", "label"),
    [
        ({"rating": 4}, True),
        ({"rating": 3.9}, False),
        ({"rating": 1, "label": True}, True),
        ({"rating": 5, "thumb": "down"}, False),
    ],
)
def test_a_threshold_labels_only_what_has_no_label(judgement: dict[str, Any], label: bool) -> None:
    found = parse({"prompt": "Hi", "answer": "Hello", **judgement}, rating_threshold=4.0)
    assert isinstance(found, FeedbackRow)
    assert (found.label, found.rating) == (label, judgement["rating"])


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"label": None}, "missing_judgement", "neither label nor thumb nor rating"),
        ({"label": 2}, "wrong_type", "label is a number, not true or false"),
        ({"label": "true"}, "wrong_type", "label is text, not true or false"),
        ({"thumb": "Up"}, "wrong_type", "thumb is another text, not up or down"),
        ({"thumb": True}, "wrong_type", "thumb is true or false, not up or down"),
        ({"thumb": "down", "label": True}, "wrong_type", "label and thumb contradict each other"),
        ({"rating": "5"}, "wrong_type", "rating is text, not a number"),
        ({"rating": True}, "wrong_type", "rating is true or false, not a number"),
        ({"rating": 10**400}, "wrong_type", "rating is not finite"),
        ({"answer": "x"}, "wrong_type", "completion and answer are both there"),
        ({"completion": None}, "wrong_type", "no answer (completion, response or answer); columns: label, prompt"),
        ({"prompt": None}, "wrong_type", "no prompt; columns: completion, label"),
        ({"source": 3}, "wrong_type", "source is a number, not text"),
        ({"prompt": " "}, "empty_prompt", "turn 1 of the prompt is blank"),
        ({"completion": " \n"}, "empty_response", "turn 1 of the answer is blank"),
        ({"completion": []}, "last_turn_not_assistant", "role of the last turn: none"),
        ({"prompt": ANSWER}, "role_order", "turn 1 is assistant after start"),
        ({"completion": ANSWER + USER + ANSWER}, "role_order", "turn 2 of the answer is the user's"),
        ({"prompt": "Other", "completion": USER + ANSWER}, "prompt_mismatch", "the prompt's text is neither"),
        ({"completion": "end<|im_end|>"}, "special_tokens_in_content", "encodes to <|im_end|>"),
        ({"prompt": "word " * 200}, "prompt_too_long", "at most 100"),
        ({"completion": "word " * 40}, "response_too_long", "at most 60"),
    ],
)
def test_each_reason(fields: dict[str, Any], reason: str, detail: str, check_feedback: Any) -> None:
    row = {**feedback(1, start=99)[0], **fields}
    limits = {"max_prompt_tokens": 100, "max_response_tokens": 60}
    data = check_feedback([*feedback(), row], **limits)
    assert [(item.reason_code, item.source_row) for item in data.quarantined] == [(reason, 41)]
    assert detail in data.quarantined[0].detail
    assert data.counts["feedback"].quarantined == {reason: 1}
    assert len(data.feedback) == data.counts["feedback"].kept == 40


def test_prompt_and_answer_together_too_long(check_feedback: Any) -> None:
    row = {"prompt": "word " * 20, "answer": "word " * 20, "label": True}
    total = check_feedback([*feedback(), row]).tokens("feedback").values()
    longest = max(item.prompt_tokens + item.chosen_tokens for item in total)
    data = check_feedback([*feedback(), row], max_total_tokens=longest - 1)
    assert data.counts["feedback"].quarantined == {"too_long": 1}
    assert data.quarantined[0].detail == f"{longest} tokens, at most {longest - 1}"


def test_tokens_are_those_of_training(check_feedback: Any, chat_tokenizer: Any) -> None:
    from training_core.models.chat import encode_conversation

    data = check_feedback(feedback(10))
    for row in data.feedback:
        ids, num_prompt = encode_conversation(chat_tokenizer, row["prompt_messages"], row["answer_messages"])
        numbers = data.tokens("feedback")[row["source_row"]]
        assert (numbers.prompt_tokens, numbers.chosen_tokens) == (num_prompt, len(ids) - num_prompt)


def test_a_repeated_judgement_counts_once(check_feedback: Any) -> None:
    first = feedback(1)[0]
    rows = [
        *feedback(),
        {"prompt": "tell me  about 0.", "answer": "IT is 0.", "thumb": "up"},  # The same, written otherwise.
        {**first, "rating": 4},
        {**first, "rating": 4},
        {**first, "rating": 2},  # Another person's.
    ]
    data = check_feedback(rows)
    assert [(item.reason_code, item.source_row) for item in data.quarantined] == [
        ("duplicate_feedback", 41),
        ("duplicate_feedback", 43),
    ]
    assert data.quarantined[0].detail.startswith("repeats row 1 of ")
    assert data.whole["num_feedback_duplicates"] == 2
    kept = check_feedback(rows, duplicates="keep_all")
    assert (len(kept.feedback), kept.whole["num_feedback_duplicates"]) == (44, 2)


def test_labels_both_ways_are_a_conflict(check_feedback: Any) -> None:
    first = feedback(1)[0]
    rows = [*feedback(), {**first, "label": False}, {**first, "label": None, "rating": 1}]
    data = check_feedback(rows)
    # Rows 1 and 41 contradict each other; a rating without a label contradicts nothing.
    assert [(item.reason_code, item.source_row) for item in data.quarantined] == [
        ("conflicting_labels", 1),
        ("conflicting_labels", 41),
    ]
    assert data.whole["num_feedback_conflicts"] == 2
    kept = check_feedback(rows, conflicts="keep_all")
    assert (len(kept.feedback), kept.whole["num_feedback_conflicts"]) == (42, 2)


def test_pairs_and_feedback_of_one_prompt_are_on_one_side(good_pairs: Any, write_rows: Any, check: Any) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": pair["prompt"].upper()}]}
        | {"answer": "Fine.", "rating": index}
        for index, pair in enumerate(good_pairs)
    ]
    path = write_rows(rows, "feedback.jsonl")
    data = check(write_rows(good_pairs), feedback=[{"path": str(path)}], validation_fraction=0.3)
    sides = [
        {group_id(row.prompt) for row in (*pairs, *judged)}
        for pairs, judged in (
            (data.train, data.rows("train_feedback")),
            (data.validation, data.rows("validation_feedback")),
        )
    ]
    assert not sides[0] & sides[1]
    for pairs, judged in (
        (data.train, data.rows("train_feedback")),
        (data.validation, data.rows("validation_feedback")),
    ):
        assert {group_id(row.prompt) for row in pairs} == {group_id(row.prompt) for row in judged} != set()
    # Both give prompts, each text once, pairs first; the system turn makes another text of the same group.
    assert [item.prompt for item in data.eval_prompts] == [
        row.prompt for row in (*data.validation, *data.rows("validation_feedback"))
    ]
    assert [item.prompt for item in data.rl_prompts] == [
        row.prompt for row in (*data.train, *data.rows("train_feedback"))
    ]


def test_evaluation_prompts_are_held_out_of_feedback(check_feedback: Any, write_rows: Any) -> None:
    held_out = write_rows([{"prompt": "TELL me about  7."}], "eval.jsonl")
    data = check_feedback(feedback(), eval_prompts=str(held_out))
    assert [(item.reason_code, item.source_row) for item in data.quarantined] == [("prompt_in_evaluation", 8)]
    # Without that file the validation side is held out, of the prompts for RL too.
    for_rl = write_rows([{"prompt": row["prompt"]} for row in feedback()], "rl.jsonl")
    data = check_feedback(feedback(), rl_prompts=str(for_rl), validation_fraction=0.3)
    assert len(data.rl_prompts) == len(data.rows("train_feedback"))
    assert data.counts["rl_prompts"].quarantined == {"prompt_in_evaluation": len(data.rows("validation_feedback"))}


def test_the_fingerprint_is_of_pairs_and_feedback(good_pairs: Any, write_rows: Any, check: Any) -> None:
    pairs = write_rows(good_pairs)

    def fingerprint(rows: list[dict[str, Any]] | None) -> str:
        files = [{"path": str(write_rows(rows, "feedback.jsonl"))}] if rows else []
        return str(check(pairs, feedback=files).fingerprint)

    rows = feedback()
    assert fingerprint(rows) == fingerprint(rows[::-1])
    changed = [{**rows[0], "rating": 1}, *rows[1:]]
    assert len({fingerprint(None), fingerprint(rows), fingerprint(changed), fingerprint(rows[1:])}) == 4


def test_what_a_file_holds_is_told(check: Any, write_rows: Any) -> None:
    paths = [
        write_rows([{**row, "user": "u1"} for row in feedback(5)], "a.jsonl"),
        write_rows(feedback(5, 5), "b.parquet"),
    ]
    data = check(feedback=[{"path": str(path)} for path in paths])
    first = data.formats[0]
    assert (first.format, first.unused_columns) == ("feedback", ["user"])
    assert "5 of 5 sampled rows have label" in first.evidence
    assert {row.source for row in data.feedback} == {"a.jsonl", "b.parquet"}
    with pytest.raises(DataError, match=r"data\.feedback\.0\.path: .*format pairs .*belongs in data\.preferences"):
        check(feedback=[{"path": str(write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "p.jsonl"))}])
    with pytest.raises(DataError, match="could not be read"):
        check(feedback=[{"path": str(write_rows([b"{"], "p.jsonl"))}])


few = st.sampled_from(["", "yes", "Yes ", "no", "word " * 40, "a\x00", "x<|im_end|>"])
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "y"]), "content": few}), max_size=3
)
cells = st.one_of(few, turns, st.none(), st.integers(0, 3), st.booleans(), st.sampled_from(["up", "down"]))
columns = st.sampled_from(["prompt", "completion", "response", "answer", "label", "thumb", "rating"])
good = st.fixed_dictionaries(
    {"prompt": st.sampled_from("abc"), "answer": st.sampled_from("xy"), "label": st.booleans()},
    optional={"rating": st.integers(0, 2)},
)
lines = st.one_of(st.dictionaries(columns, cells), good).map(lambda row: json.dumps(row).encode())


@given(
    content=st.lists(
        st.one_of(lines, st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))), max_size=20
    )
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_row_is_lost(content: list[bytes], tmp_path: Path, check: Any) -> None:
    content = [json.dumps(feedback(1)[0]).encode(), *content]
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(content))
    data = check(feedback=[{"path": str(path), "format": "feedback", "rating_threshold": 2.0}], max_total_tokens=60)
    expected = [number for number, line in enumerate(content, start=1) if line.strip()]
    counts = data.counts["feedback"]
    assert counts.rows == len(expected) == counts.kept + sum(counts.quarantined.values())
    assert sorted([row.source_row for row in data.feedback] + [row.source_row for row in data.quarantined]) == expected
    labels: dict[Any, set[bool]] = {}
    for row in data.feedback:
        if row.label is not None:
            labels.setdefault((row.prompt, row.answer), set()).add(row.label)
    assert all(len(found) == 1 for found in labels.values())
