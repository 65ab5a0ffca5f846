"""Conversations to ids: boundaries, BOS, EOS."""

from __future__ import annotations

from pathlib import Path

import pytest

from training_core.errors import DataError
from training_core.models.chat import (
    check_single_bos,
    decode_answer,
    encode_conversation,
    encode_pair,
    encode_prompt,
    render_chat,
)
from training_core.models.loading import load_tokenizer
from training_core.records import Message

PROMPT = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture
def tokenizer(tiny_checkpoint: Path):  # type: ignore[no-untyped-def]
    return load_tokenizer(tiny_checkpoint)


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_prompt_opens_the_assistants_turn(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = tokenizer.decode(encode_prompt(tokenizer, PROMPT))
    assert text == "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"


def test_records_and_dicts_encode_alike(tokenizer) -> None:  # type: ignore[no-untyped-def]
    records = [Message(role="user", content=PROMPT[0]["content"])]
    assert encode_prompt(tokenizer, records) == encode_prompt(tokenizer, PROMPT)


@pytest.mark.parametrize("text", ["It is warm.", "\n It is warm.", "\n", " ", "", "é", "123"])
def test_conversation_starts_with_the_prompt_and_ends_with_eos(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    ids, num_prompt_tokens = encode_conversation(tokenizer, PROMPT, answer(text))
    assert ids[:num_prompt_tokens] == encode_prompt(tokenizer, PROMPT)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids[num_prompt_tokens:].count(tokenizer.eos_token_id) == 1
    assert decode_answer(tokenizer, ids[num_prompt_tokens:]) == text


def test_an_answer_that_merges_with_the_prompt_keeps_the_boundary(tokenizer) -> None:  # type: ignore[no-untyped-def]
    # The template's prompt ends in a word here, and the answer goes on with it: one text, other tokens.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    prompt = [{"role": "user", "content": "the st"}]
    prompt_ids = encode_prompt(tokenizer, prompt)
    joint = tokenizer("the street", add_special_tokens=False)["input_ids"]
    assert joint[: len(prompt_ids)] != prompt_ids, "this text does not merge, so it tests nothing"
    ids, num_prompt_tokens = encode_conversation(tokenizer, prompt, answer("reet"))
    assert ids[:num_prompt_tokens] == prompt_ids
    assert tokenizer.decode(ids[:-1]) == "the street"


def test_a_template_that_ends_answers_with_eos_gets_no_second_one(tokenizer) -> None:  # type: ignore[no-untyped-def]
    rendered = render_chat(tokenizer, [*PROMPT, *answer("Yes.")], add_generation_prompt=False)
    ids, _ = encode_conversation(tokenizer, PROMPT, answer("Yes."))
    assert tokenizer.decode(ids) + "\n" == rendered


def test_a_template_without_eos_gets_one(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids, num_prompt_tokens = encode_conversation(tokenizer, PROMPT, answer("Yes."))
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[num_prompt_tokens:-1]) == "Yes.\n"


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="renders the prompt differently"):
        encode_conversation(tokenizer, PROMPT, answer("Yes."))


def test_a_template_that_raises_names_the_roles(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"\[user\].*roles must alternate"):
        encode_prompt(tokenizer, PROMPT)


def test_bos_in_template_and_tokenizer_is_not_doubled(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids = encode_prompt(tokenizer, PROMPT)
    assert ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(DataError, match="two BOS"):
        encode_prompt(tokenizer, [{"role": "user", "content": "<|endoftext|>Hello"}])
    check_single_bos(tokenizer, [tokenizer.bos_token_id, 7, tokenizer.bos_token_id])


def test_pair_shares_its_prompt(tokenizer) -> None:  # type: ignore[no-untyped-def]
    chosen, rejected, num_prompt_tokens = encode_pair(tokenizer, PROMPT, answer("Warm."), answer("\nCold and grey."))
    assert chosen[:num_prompt_tokens] == rejected[:num_prompt_tokens] == encode_prompt(tokenizer, PROMPT)
    assert chosen != rejected


def test_empty_messages_are_refused(tokenizer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="at least one message"):
        encode_prompt(tokenizer, [])
    with pytest.raises(DataError, match="at least one message"):
        encode_conversation(tokenizer, PROMPT, [])
