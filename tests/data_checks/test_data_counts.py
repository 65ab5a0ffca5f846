"""No row is lost, splits are disjoint and stable, the fingerprint does not depend on order."""

from __future__ import annotations

import copy
import doctest
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_checks import tokens as tokens_module
from data_checks.config import CheckDataConfig
from data_checks.keys import group_id, normalise_text
from data_checks.result import Ledger
from data_checks.splits import is_validation
from data_checks.tokens import Limits, encode_conversations

few_texts = st.sampled_from(["", " ", "yes", "Yes ", "no", "maybe<|im_end|>", "word " * 40, "a\x00", "é"])
few_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": few_texts}
    ),
    max_size=4,
)
cells = st.one_of(few_texts, few_messages, st.none(), st.integers(), st.booleans(), st.lists(st.none(), max_size=2))
objects = st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected", "margin", "chosen_score"]), cells)
likely_good = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["a", "b", "c"]), "chosen": st.sampled_from("xyz"), "rejected": st.sampled_from("xyz")}
)
lines = st.one_of(
    objects.map(lambda value: json.dumps(value).encode()),
    likely_good.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")),
)


@given(content=st.lists(lines, min_size=1, max_size=25), format_name=st.sampled_from(["pairs", "hh"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_add_up_whatever_is_in_the_file(
    content: list[bytes], format_name: str, tmp_path: Path, check: Any
) -> None:
    content = [b'{"prompt": "first", "chosen": "yes", "rejected": "no"}', *content]
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(content))
    data = check(path, format=format_name, max_total_tokens=60)
    expected = [number for number, line in enumerate(content, start=1) if line.strip()]
    counts = data.counts["preferences"]
    assert counts.rows == counts.examples == len(expected) == counts.kept + sum(counts.quarantined.values())
    used = [row.source_row for row in data.pairs]
    assert sorted(used + [row.source_row for row in data.quarantined]) == expected
    assert len(used) == counts.kept


def test_counts_over_several_files(good_pairs: Any, write_rows: Any, check: Any) -> None:
    swapped = {**good_pairs[5], "chosen": good_pairs[5]["rejected"], "rejected": good_pairs[5]["chosen"]}
    first = write_rows([*good_pairs[:20], b"", b"{", b"  ", good_pairs[0]], "first.jsonl")
    second = write_rows([b"", good_pairs[1], *good_pairs[20:], swapped, b"\xff", b"[]"], "second.jsonl.gz")
    third = write_rows([good_pairs[2], {"prompt": "x", "chosen": " ", "rejected": "y"}], "third.parquet")
    data = check(first, second, third)
    counts = data.counts["preferences"]
    assert (counts.rows, counts.kept) == (22 + 24 + 2, 39)
    assert counts.quarantined == {
        "malformed_json": 2,
        "invalid_unicode": 1,
        "empty_response": 1,
        "conflicting_pair": 2,
        "duplicate_pair": 3,
    }
    assert sorted((row.source_file, row.source_row, row.reason_code) for row in data.quarantined) == [
        ("first.jsonl", 6, "conflicting_pair"),
        ("first.jsonl", 22, "malformed_json"),
        ("first.jsonl", 24, "duplicate_pair"),
        ("second.jsonl.gz", 2, "duplicate_pair"),
        ("second.jsonl.gz", 23, "conflicting_pair"),
        ("second.jsonl.gz", 24, "invalid_unicode"),
        ("second.jsonl.gz", 25, "malformed_json"),
        ("third.parquet", 1, "duplicate_pair"),
        ("third.parquet", 2, "empty_response"),
    ]
    assert data.numbers()["rows_unaccounted"] == 0


def test_a_system_message_moves_no_prompt_to_the_other_side(good_pairs: Any, write_rows: Any, check: Any) -> None:
    def with_system(row: dict[str, Any], text: str) -> dict[str, Any]:
        system = [{"role": "system", "content": text}]
        return {**row, "prompt": [*system, {"role": "user", "content": row["prompt"]}]}

    rows = [*good_pairs, *(with_system(row, text) for row in good_pairs for text in ("Be kind.", "Be brief."))]
    data = check(write_rows(rows), validation_fraction=0.3)
    assert data.counts["preferences"].kept == 120  # Another system message makes another prompt, no duplicate.
    sides = [{row.prompt[-1].content for row in part} for part in (data.train, data.validation)]
    assert not sides[0] & sides[1]
    assert (len(data.rl_prompts), len(data.eval_prompts)) == (3 * len(sides[0]), 3 * len(sides[1]))


def test_large_tables_are_built_in_pieces(
    good_pairs: Any, write_rows: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_rows([{"prompt": f"Prompt {index * index}"} for index in range(60)], "rl.jsonl")
    path = write_rows(good_pairs)
    sizes: list[int] = []

    def content() -> list[Any]:
        data = check(path, rl_prompts=str(prompts))
        tables = (data.table("train_pairs"), data.table("validation_pairs"), data.table("rl_prompts"))
        numbers = (data.features(), data.features("rl_prompts"))
        return [*(table.to_pylist() for table in (*tables, *numbers)), data.fingerprint]

    whole = content()
    monkeypatch.setattr("data_checks.table_files.ROW_GROUP_SIZE", 7)
    monkeypatch.setattr("data_checks.reading.block.MAX_BLOCK_ROWS", 9)
    monkeypatch.setattr("data_checks.tokens.BATCH_TEXTS", 11)
    encode = tokens_module.encode_all
    monkeypatch.setattr(
        tokens_module, "encode_all", lambda tokenizer, texts: sizes.append(len(texts)) or encode(tokenizer, texts)
    )
    assert content() == whole
    assert max(sizes) <= 4 * 11  # Two sides of a pair, each with and without its answer.


def test_a_lost_row_is_noticed() -> None:
    with pytest.raises(AssertionError, match="a row is lost"):
        Ledger(rows=3, examples=3, kept=1, quarantined={"too_long": 1}, dropped={}, defects={})
    with pytest.raises(AssertionError, match="a row became no example"):
        Ledger(rows=3, examples=2, kept=1, quarantined={"too_long": 1}, dropped={}, defects={})


def test_splits_share_no_prompt_and_do_not_move(good_pairs: Any, write_rows: Any, check: Any) -> None:
    twice = [{**row, "chosen": row["chosen"] + "!", "prompt": row["prompt"].upper() + " "} for row in good_pairs]
    before = check(write_rows([*good_pairs, *twice]), validation_fraction=0.3)
    sides = [{group_id(row.prompt) for row in part} for part in (before.train, before.validation)]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]
    assert len(before.train) == 2 * len(sides[0])
    assert [group_id(item.prompt) for item in before.rl_prompts] == list(
        dict.fromkeys(group_id(r.prompt) for r in before.train)
    )
    assert {group_id(item.prompt) for item in before.eval_prompts} == sides[1]
    new = [{"prompt": f"New {index}", "chosen": "a", "rejected": "b"} for index in range(30)]
    after = check(write_rows([*new, *good_pairs]), validation_fraction=0.3)
    assert {group_id(row.prompt) for row in after.train} >= sides[0]
    assert {group_id(row.prompt) for row in after.validation} >= sides[1]


def test_split_follows_seed_and_fraction() -> None:
    groups = [f"group {index}" for index in range(2000)]
    held_out = {group for group in groups if is_validation(group, 1, 0.2)}
    assert 330 < len(held_out) < 470
    assert held_out < {group for group in groups if is_validation(group, 1, 0.3)}
    assert held_out != {group for group in groups if is_validation(group, 2, 0.2)}


def test_rl_prompts_from_a_file_keep_clear_of_the_validation_split(
    good_pairs: Any, write_rows: Any, check: Any
) -> None:
    prompts = write_rows([{"prompt": row["prompt"]} for row in good_pairs], "rl.jsonl")
    data = check(write_rows(good_pairs), rl_prompts=str(prompts), validation_fraction=0.3)
    held_out = {group_id(row.prompt) for row in data.validation}
    assert data.counts["rl_prompts"].quarantined == {"prompt_in_evaluation": len(held_out)}
    assert {group_id(item.prompt) for item in data.rl_prompts} == {group_id(row.prompt) for row in data.train}
    # The split put them there, so they are no defects of the file.
    assert data.numbers()["rl_prompts_quarantined_fraction"] == 0
    evaluation = write_rows([{"prompt": good_pairs[0]["prompt"]}], "eval.jsonl")
    data = check(write_rows(good_pairs[1:]), rl_prompts=str(prompts), eval_prompts=str(evaluation))
    assert data.numbers()["rl_prompts_quarantined_fraction"] == 1 / 40


DOCUMENTED = ("files", "keys", "naming", "splits", "comparison", "presentation.words", "reading.json_lists")


@pytest.mark.parametrize("module", DOCUMENTED)
def test_examples_in_docstrings(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"data_checks.{module}"))
    assert (results.failed, results.attempted > 0) == (0, True)


def test_the_tokenizers_own_limit_wins(chat_tokenizer: Any) -> None:
    config = CheckDataConfig.model_validate({"preferences": [{"path": "a.jsonl"}], "max_total_tokens": 300})
    limited, unlimited = copy.copy(chat_tokenizer), copy.copy(chat_tokenizer)
    limited.model_max_length, unlimited.model_max_length = 200, int(1e30)
    assert (Limits.of(config, limited).max_total_tokens, Limits.of(config, limited).total_limited_by) == (
        200,
        "tokenizer",
    )
    assert (Limits.of(config, unlimited).max_total_tokens, Limits.of(config, unlimited).total_limited_by) == (
        300,
        "config",
    )


def test_chosen_longer_share_is_of_tokens_where_they_are_known(good_pairs: Any, write_rows: Any, check: Any) -> None:
    data = check(write_rows(good_pairs))
    rows = list(data.tokens().values())
    longer = sum(row.chosen_tokens > row.rejected_tokens for row in rows)
    ties = sum(row.chosen_tokens == row.rejected_tokens for row in rows)
    assert data.numbers()["chosen_longer_share"] == pytest.approx((longer + ties / 2) / 40)


def test_inverted_scores_are_counted(good_pairs: Any, write_rows: Any, check: Any) -> None:
    rows = [
        {**row, "chosen_score": 1.0, "rejected_score": 2.0 if index < 4 else 0.5}
        for index, row in enumerate(good_pairs)
    ]
    assert check(write_rows(rows)).numbers()["score_inverted_fraction"] == 0.1


def test_fingerprint_ignores_order_and_files_but_no_text(good_pairs: Any, write_rows: Any, check: Any) -> None:
    shuffled = list(good_pairs)
    random.Random(0).shuffle(shuffled)
    whole = check(write_rows(good_pairs)).fingerprint
    assert check(write_rows(shuffled[:7], "a.parquet"), write_rows(shuffled[7:], "b.jsonl.gz")).fingerprint == whole
    for change in ({"chosen": "It is Fine. 0"}, {"margin": 0.5}):
        assert check(write_rows([{**good_pairs[0], **change}, *good_pairs[1:]])).fingerprint != whole


def test_text_is_never_normalised_only_keys_are(write_rows: Any, good_pairs: Any, check: Any) -> None:
    odd = {"prompt": " Cafe\u0301\t?", "chosen": "  YES \n", "rejected": "\u00a0No"}
    data = check(write_rows([*good_pairs, odd]))
    row = next(row for row in data.pairs if row["source_row"] == 41)
    assert row["prompt_messages"] == [{"role": "user", "content": odd["prompt"]}]
    assert row["chosen_messages"] == [{"role": "assistant", "content": odd["chosen"]}]
    assert row["rejected_messages"] == [{"role": "assistant", "content": odd["rejected"]}]
    assert normalise_text(odd["prompt"]) == "café ?"


def test_tokens_are_counted_as_training_encodes_them(
    good_pairs: Any, write_rows: Any, check: Any, chat_tokenizer: Any
) -> None:
    from training_core.models.chat import encode_conversation, encode_prompt

    data = check(write_rows(good_pairs))
    for row in data.pairs:
        prompt, chosen, rejected = (
            [turn._asdict() for turn in part] for part in (row.prompt, row.chosen, row.rejected)
        )
        ids, num_prompt_tokens = encode_conversation(chat_tokenizer, prompt, chosen)
        numbers = data.tokens()[row.source_row]
        assert (numbers.prompt_tokens, numbers.chosen_tokens) == (num_prompt_tokens, len(ids) - num_prompt_tokens)
        ids, _ = encode_conversation(chat_tokenizer, prompt, rejected)
        assert numbers.rejected_tokens == len(ids) - num_prompt_tokens
    longest = max(
        len(encode_prompt(chat_tokenizer, [turn._asdict() for turn in item.prompt])) for item in data.rl_prompts
    )
    assert data.whole["longest_rl_prompts_tokens"] == longest
    assert encode_conversations(chat_tokenizer, []) == []


def test_prompt_columns(good_pairs: Any, write_rows: Any, check: Any) -> None:
    prompts = [{"prompt": "One", "prompt_id": "p1", "answer": {"value": [1, 2]}}, {"prompt": "Two"}]
    data = check(write_rows(good_pairs), eval_prompts=str(write_rows(prompts, "eval.jsonl")))
    rows = data.eval_prompts
    assert [json.loads(row["extra"]) for row in rows] == [{"answer": {"value": [1, 2]}}, {}]
    assert rows[0]["prompt_id"] == "p1"
    assert len(rows[1]["prompt_id"]) == 32
