"""Chat messages to token ids: one renderer for training, scoring, rollouts and evaluation.

The template's text is tokenized without further special tokens, so a template that writes BOS itself does not get a
second one. The boundary between prompt and answer is a token boundary: the ids of a conversation always start with
exactly the ids that a rollout starts from. An answer ends with its end-of-turn token and nothing after it, as a
generated answer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from training_core.errors import DataError
from training_core.records import Message

Messages = Sequence[Message] | Sequence[Mapping[str, str]]


def as_dicts(messages: Messages) -> list[dict[str, str]]:
    return [
        {"role": m.role, "content": m.content}
        if isinstance(m, Message)
        else {"role": m["role"], "content": m["content"]}
        for m in messages
    ]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, add_generation_prompt: bool) -> str:
    """Return the template's text.

    Raises:
        DataError: the template refuses these messages (for example two user turns in a row).
    """
    try:
        text = tokenizer.apply_chat_template(
            as_dicts(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # Templates raise jinja errors of many kinds, and ValueError when there is none.
        roles = ", ".join(m["role"] for m in as_dicts(messages))
        raise DataError(f"the chat template does not render messages with roles [{roles}]: {error}") from error
    return str(text)


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of rendered text; special tokens are recognised, none are added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the ids that a rollout starts from: all messages and the opening of the assistant's turn.

    Raises:
        DataError: no messages, the template refuses them, or the ids start with two BOS tokens.
    """
    if not messages:
        raise DataError("a prompt needs at least one message")
    ids = tokenize_text(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True))
    check_single_bos(tokenizer, ids)
    return ids


def check_single_bos(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Refuse ids that open with two BOS tokens.

    Only the opening counts: ChatML-like tokenizers use the start-of-turn token as BOS, and it opens every turn.

    Raises:
        DataError: two BOS tokens in a row at the start.
    """
    bos = tokenizer.bos_token_id
    if bos is not None and list(ids[:2]) == [bos, bos]:
        raise DataError(
            f"the rendered chat starts with two BOS tokens (id {bos}): the template writes BOS and a message or the "
            "tokenizer adds another. Remove one of them"
        )


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, answer: Messages
) -> tuple[list[int], int]:
    """Return the ids of prompt and answer, and how many of them are the prompt's.

    The first `num_prompt_tokens` ids equal `encode_prompt(tokenizer, prompt)`. The last id is the end-of-turn (EOS)
    token: what the template writes after it (a newline, say) is left out, and a missing one is added.

    Args:
        tokenizer: with a chat template and an EOS token.
        prompt: messages up to the assistant's turn.
        answer: the assistant's messages (usually one).

    Raises:
        DataError: the template refuses the messages, or the conversation does not start with the rendered prompt.
    """
    if not answer:
        raise DataError("an answer needs at least one message")
    prompt_text = render_chat(tokenizer, prompt, add_generation_prompt=True)
    full_text = render_chat(tokenizer, [*as_dicts(prompt), *as_dicts(answer)], add_generation_prompt=False)
    prompt_ids = encode_prompt(tokenizer, prompt)
    if not full_text.startswith(prompt_text):
        raise DataError(
            "the chat template renders the prompt differently once an answer follows, so the answer cannot be told "
            f"from the prompt. The prompt ends in {prompt_text[-40:]!r}; use a template without such a difference"
        )
    ids = tokenize_text(tokenizer, full_text)
    if ids[: len(prompt_ids)] != prompt_ids:
        # The answer's first characters merged with the prompt's last token; a generated answer could not do that.
        ids = prompt_ids + tokenize_text(tokenizer, full_text[len(prompt_text) :])
    return end_at_eos(tokenizer, ids, len(prompt_ids)), len(prompt_ids)


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, chosen: Messages, rejected: Messages
) -> tuple[list[int], list[int], int]:
    """Return the ids of prompt + chosen, of prompt + rejected, and the number of prompt tokens both start with."""
    chosen_ids, num_prompt_tokens = encode_conversation(tokenizer, prompt, chosen)
    rejected_ids, _ = encode_conversation(tokenizer, prompt, rejected)
    return chosen_ids, rejected_ids, num_prompt_tokens


def end_at_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int], num_prompt_tokens: int) -> list[int]:
    """Return `ids` cut after the answer's last EOS, or with EOS added when the answer has none.

    Raises:
        DataError: the tokenizer has no EOS token.
    """
    eos = end_token_id(tokenizer)
    for position in range(len(ids) - 1, num_prompt_tokens - 1, -1):
        if ids[position] == eos:
            return ids[: position + 1]
    return [*ids, eos]


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of EOS, at which conversations end here.

    Raises:
        DataError: the tokenizer has no EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token, so an answer has no end. Set `eos_token` in its config")
    return int(tokenizer.eos_token_id)


def decode_answer(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of generated ids without special tokens; whitespace is kept as generated."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
