"""Every reason has rows that trigger exactly it."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_checking import Loaded, files_of, load_check
from tokenizers import normalizers

from data_checks.config import CheckDataConfig
from data_checks.formats import parse_prompt
from data_checks.rows import ADVICE, Finding, RawRow, Reason, Turn
from data_checks.tokens import load_tokenizer, render
from training_core.data.tables import build_pair_table
from training_core.errors import PreemptedError, StopRequestedError
from training_core.protocol.context import StopSignal

LONG = " ".join(["the sea and the rain"] * 30)


def messages(*turns: str) -> list[dict[str, str]]:
    """Turns like "user: hello" as chat messages."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def pair(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Say something.", "chosen": "Yes, gladly.", "rejected": "No, never.", **fields}


SYSTEM_PROMPT = messages("system: Be kind.", "user: Say something.")
PAIR_CASES: list[tuple[Reason, list[Any], dict[str, Any]]] = [
    (Reason.MALFORMED_JSON, [b'{"prompt": "a", "chosen": '], {}),
    (Reason.MALFORMED_JSON, [b'["a list"]', b"3", b"null"], {}),
    (Reason.MALFORMED_JSON, [b'{"prompt": "a", "prompt": "b", "chosen": "c", "rejected": "d"}'], {}),
    (Reason.MALFORMED_JSON, [b'{"prompt": "a", "chosen": "c", "rejected": "d", "margin": Infinity}'], {}),
    (Reason.MALFORMED_JSON, [b'{"prompt":' + b"[" * 100_000], {}),
    (Reason.MALFORMED_JSON, [b'{"margin": ' + b"9" * 5000 + b"}"], {}),
    (Reason.INVALID_UNICODE, [b'{"prompt": "a\xff", "chosen": "b", "rejected": "c"}'], {}),
    (Reason.INVALID_UNICODE, [b'{"prompt": "a\\ud800", "chosen": "b", "rejected": "c"}'], {}),
    (Reason.NUL_CHARACTER, [pair(chosen="a\x00b")], {}),
    (Reason.WRONG_TYPE, [pair(chosen=5), pair(prompt=["text"]), pair(rejected={"text": "x"})], {}),
    (Reason.WRONG_TYPE, [{"prompt": "a", "chosen": "b"}, {"chosen": "b", "rejected": "c"}], {}),
    (Reason.WRONG_TYPE, [pair(margin=True), pair(margin="1.0"), pair(source=3)], {}),
    (Reason.MALFORMED_JSON, [b'{"prompt": "a", "chosen": "c", "rejected": "d", "margin": 1e999}'], {}),
    (Reason.WRONG_TYPE, [pair(margin=int("9" * 400))], {}),
    (Reason.WRONG_TYPE, [pair(prompt=messages("wizard: Hello there"))], {}),
    (Reason.WRONG_TYPE, [pair(prompt=[{"role": "user", "content": [{"type": "text"}]}])], {}),
    (Reason.WRONG_TYPE, [pair(prompt=[{"role": "user", "content": "a", "weight": 1}])], {}),
    (Reason.LAST_TURN_NOT_ASSISTANT, [pair(chosen=[], rejected=[])], {}),
    (
        Reason.LAST_TURN_NOT_ASSISTANT,
        [pair(chosen=messages("assistant: A", "user: B"), rejected=messages("assistant: A", "user: C"))],
        {},
    ),
    (Reason.PROMPT_MISMATCH, [pair(chosen=messages("user: Another question", "assistant: Yes"))], {}),
    (
        Reason.PROMPT_MISMATCH,
        [pair(prompt=SYSTEM_PROMPT, chosen=messages("system: Be rude.", "user: Say something.", "assistant: No"))],
        {},
    ),
    (Reason.EMPTY_PROMPT, [pair(prompt=" \n\t")], {}),
    (Reason.EMPTY_PROMPT, [pair(prompt=messages("user: a", "assistant:  ", "user: b"))], {}),
    (Reason.EMPTY_RESPONSE, [pair(chosen="  \n"), pair(rejected="", chosen="b")], {}),
    (Reason.EMPTY_RESPONSE, [pair(chosen=" ", rejected="\n")], {}),
    (Reason.ROLE_ORDER, [pair(prompt=messages("user: a", "user: b"))], {}),
    (Reason.ROLE_ORDER, [pair(prompt=messages("user: a", "assistant: b"))], {}),
    (Reason.ROLE_ORDER, [pair(prompt=messages("user: a", "system: b", "user: c"))], {}),
    (Reason.ROLE_ORDER, [pair(prompt=messages("system: a"))], {}),
    (
        Reason.ROLE_ORDER,
        [pair(chosen=messages("assistant: A", "user: B", "assistant: C"), rejected=messages("assistant: D"))],
        {},
    ),
    (Reason.IDENTICAL_RESPONSES, [pair(rejected="Yes, gladly."), pair(rejected="  Yes, gladly.\n")], {}),
    (Reason.SPECIAL_TOKENS, [pair(chosen="Yes.<|im_end|>"), pair(prompt="a <|endoftext|> b")], {}),
    (Reason.PROMPT_TOO_LONG, [pair(prompt=LONG)], {"max_prompt_tokens": 60}),
    (Reason.RESPONSE_TOO_LONG, [pair(chosen=LONG), pair(rejected=LONG)], {"max_response_tokens": 60}),
    (Reason.TOO_LONG, [pair(chosen=LONG)], {"max_total_tokens": 120}),
    (Reason.CONFLICTING_PAIR, [pair(), pair(chosen="No, never.", rejected="Yes, gladly.")], {}),
]


@pytest.mark.parametrize(("reason", "rows", "fields"), PAIR_CASES)
def test_pair_reason(
    reason: Reason, rows: list[Any], fields: dict[str, Any], good_pairs: Any, write_rows: Any, check: Any
) -> None:
    data: Loaded = check(write_rows([*good_pairs, *rows]), **fields)
    counts = data.counts["preferences"]
    assert counts.quarantined == {reason.value: len(rows)}
    assert list(counts.defects) == [reason.value]
    assert counts.kept == len(data.pairs) == len(good_pairs)
    assert [row.source_row for row in data.quarantined] == list(range(41, 41 + len(rows)))


def test_duplicates_keep_the_first(good_pairs: Any, write_rows: Any, check: Any) -> None:
    again = pair(prompt=" say SOMETHING. ", rejected="No,  never.\n")
    path = write_rows([*good_pairs, pair(), again, pair()])
    data = check(path)
    assert data.counts["preferences"].quarantined == {"duplicate_pair": 2}
    assert [row.detail for row in data.quarantined] == [f"repeats row 41 of {path.name}"] * 2
    kept = check(path, duplicates="keep_all")
    assert kept.counts["preferences"].quarantined == {}
    assert data.whole["num_duplicates"] == kept.whole["num_duplicates"] == 2


def test_conflicts_may_be_kept_and_case_is_no_conflict(good_pairs: Any, write_rows: Any, check: Any) -> None:
    both_ways = [pair(), pair(chosen="No, never.", rejected="Yes, gladly.")]
    kept = check(write_rows([*good_pairs, *both_ways]), conflicts="keep_all")
    assert (kept.counts["preferences"].kept, kept.whole["num_conflicts"]) == (42, 2)
    case_only = check(write_rows([*good_pairs, pair(chosen="Yes", rejected="yes")]))
    assert (case_only.counts["preferences"].kept, case_only.whole["num_conflicts"]) == (41, 0)


def test_every_reason_has_advice_and_a_case() -> None:
    elsewhere = {
        Reason.LAST_TURN_NOT_USER,
        Reason.TEMPLATE_FAILED,
        Reason.PROMPT_IN_EVALUATION,
        Reason.DUPLICATE_PAIR,
        Reason.DUPLICATE_PROMPT,
        # In tests of their own: of rows too large to be read, of ties, of secrets, of verifiers.
        Reason.ROW_TOO_LARGE,
        Reason.UNDECLARED_TIE,
        Reason.SECRET,
        Reason.GOLD_REJECTED,
        # Of feedback rows.
        Reason.MISSING_JUDGEMENT,
        Reason.CONFLICTING_LABELS,
        Reason.DUPLICATE_FEEDBACK,
    }
    assert set(ADVICE) == set(Reason)
    assert {reason for reason, _, _ in PAIR_CASES} | elsewhere == set(Reason)


def test_answers_that_are_the_same_tokens_are_identical(
    good_pairs: Any, write_rows: Any, tokenizer_directory: Path, tmp_path: Path
) -> None:
    composed, decomposed = pair(chosen="Caf\u00e9."), pair(rejected="Cafe\u0301.")
    path = write_rows([*good_pairs, {**composed, "rejected": decomposed["rejected"]}])
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path)}]})
    normalising = load_tokenizer(tokenizer_directory)
    normalising.backend_tokenizer.normalizer = normalizers.NFC()
    normalising.save_pretrained(tmp_path / "normalising")
    plain = load_check(files_of(config), config, tokenizer_directory, tmp_path / "plain")
    assert plain.counts["preferences"].quarantined == {}
    data = load_check(files_of(config), config, tmp_path / "normalising", tmp_path / "out")
    assert data.counts["preferences"].quarantined == {"identical_responses": 1}
    assert data.quarantined[0].detail == "chosen and rejected encode to the same tokens"
    # What is let through is what the reward model takes.
    kept = tmp_path / "kept.parquet"
    pq.write_table(pa.concat_tables([data.table("train_pairs"), data.table("validation_pairs")]), kept)
    assert len(build_pair_table(kept, normalising, 4096, tmp_path / "kept.arrow")) == len(good_pairs)


def test_names_of_columns_are_told_where_they_are_names_and_values_never() -> None:
    keys = {f"column {index:02}": "value" for index in range(100)} | {"a\nline": 1, "b" * 1000: 2}
    found = parse_prompt(RawRow("f", 1, "", keys))
    assert isinstance(found, Finding)
    assert found.detail.startswith("no prompt; columns: column 00, column 01, ")
    assert found.detail.endswith(", column 19, …")
    few = parse_prompt(RawRow("f", 1, "", {"a\nline": 1, "b" * 1000: 2, "c": 3}))
    assert few == Finding(
        Reason.WRONG_TYPE, "no prompt; columns: c, (a name of 6 characters), (a name of 1000 characters)"
    )
    assert "value" not in found.detail


def test_template_failed(good_pairs: Any, write_rows: Any, chat_tokenizer: Any, tmp_path: Path) -> None:
    picky = copy.deepcopy(chat_tokenizer)
    picky.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
        + str(chat_tokenizer.chat_template)
    )
    picky.save_pretrained(tmp_path / "picky")
    prompt = messages("user: a", "assistant: call", "tool: 3")
    path = write_rows([*good_pairs, pair(prompt=prompt)])
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path)}]})
    data = load_check(files_of(config), config, tmp_path / "picky", tmp_path / "out")
    assert data.counts["preferences"].quarantined == {"template_failed": 1}
    assert data.counts["preferences"].defects["template_failed"].transcripts == 2


def test_sigterm_while_a_template_renders_is_no_finding(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_tokenizer, "apply_chat_template", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    stop, handler = StopSignal(), signal.getsignal(signal.SIGTERM)
    stop.install()
    try:
        with pytest.raises(StopRequestedError):
            render(chat_tokenizer, (Turn("user", "Hello"),), add_generation_prompt=True)
    finally:
        signal.signal(signal.SIGTERM, handler)
    with pytest.raises(PreemptedError, match="stopped by SIGTERM"):
        stop.close()


def test_prompt_in_evaluation(good_pairs: Any, write_rows: Any, check: Any) -> None:
    path = write_rows(good_pairs)
    asked = {
        "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " what about NUMBER 7?"}]
    }
    evaluation = write_rows([asked, {"prompt": "Something new"}], "eval.jsonl")
    data = check(path, eval_prompts=str(evaluation))
    assert data.counts["preferences"].quarantined == {"prompt_in_evaluation": 1}
    assert [row.source_row for row in data.quarantined] == [8]
    assert len(data.eval_prompts) == 2


PROMPT_CASES: list[tuple[Reason, list[Any]]] = [
    (Reason.LAST_TURN_NOT_USER, [{"prompt": messages("user: a", "assistant: b")}]),
    (Reason.EMPTY_PROMPT, [{"prompt": ""}, {"prompt": []}]),
    (Reason.ROLE_ORDER, [{"prompt": messages("user: a", "user: b")}]),
    (Reason.DUPLICATE_PROMPT, [{"prompt": "first  PROMPT"}, {"prompt": "Unseen", "prompt_id": "one"}]),
    (Reason.SPECIAL_TOKENS, [{"prompt": "a<|im_start|>b"}]),
    (Reason.PROMPT_TOO_LONG, [{"prompt": LONG}]),
    (Reason.WRONG_TYPE, [{"text": "a"}, {"prompt": 3}, {"prompt": "x", "prompt_id": 7}]),
    (Reason.MALFORMED_JSON, [b"{"]),
    (Reason.PROMPT_IN_EVALUATION, [{"prompt": "Held out"}]),
]


@pytest.mark.parametrize(("reason", "rows"), PROMPT_CASES)
def test_prompt_reason(reason: Reason, rows: list[Any], good_pairs: Any, write_rows: Any, check: Any) -> None:
    first = {"prompt": "First prompt", "prompt_id": "one", "answer": 4}
    rl = write_rows([first, *rows], "rl.jsonl")
    evaluation = write_rows([{"prompt": "Held out"}], "eval.jsonl")
    pairs = write_rows(good_pairs)
    data = check(
        pairs, rl_prompts=str(rl), rl_prompts_format="prompts", eval_prompts=str(evaluation), max_prompt_tokens=80
    )
    counts = data.counts["rl_prompts"]
    assert counts.quarantined == {reason.value: len(rows)}
    assert list(counts.defects) == [reason.value]
    assert [(item.prompt_id, json.loads(item.extra)) for item in data.rl_prompts] == [("one", {"answer": 4})]


def test_allowed_special_tokens(good_pairs: Any, write_rows: Any, check: Callable[..., Loaded]) -> None:
    path: Path = write_rows([*good_pairs, pair(chosen="Yes.<|pad|>")])
    assert check(path).counts["preferences"].quarantined == {"special_tokens_in_content": 1}
    assert check(path, allowed_special_tokens=["<|pad|>"]).counts["preferences"].quarantined == {}


def test_a_row_with_two_defects_is_counted_once_and_both_are_told(good_pairs: Any, write_rows: Any, check: Any) -> None:
    data = check(write_rows([*good_pairs, pair(prompt=" ", chosen="\t")]))
    counts = data.counts["preferences"]
    assert counts.quarantined == {"empty_prompt": 1}
    assert {name: (found.rows, found.transcripts) for name, found in counts.defects.items()} == {
        "empty_prompt": (1, 0),
        "empty_response": (1, 1),
    }
    assert "also empty_response (chosen:" in data.quarantined[0].detail
