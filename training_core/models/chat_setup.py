"""Make a tokenizer fit for chat training: template, end of turn, a pad token of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from training_core.errors import ArtifactError, DataError
from training_core.models.chat import encode_conversation, encode_prompt, render_chat, tokenize_text

PROBE_PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
PROBE_ANSWER = [{"role": "assistant", "content": "Paris is the capital of France."}]
PAD_CANDIDATES = (
    "<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|PAD_TOKEN|>", "<|endoftext|>", "<|end_of_text|>",
    "<unk>", "<|reserved_special_token_0|>",
)  # fmt: skip
"""Tokens that serve as padding where the tokenizer names none, in this order, if they are not an end of turn."""


@dataclass
class ChatSetup:
    """What was found and what was changed."""

    eos_token_ids: list[int]
    """All ids that end a turn, the tokenizer's own first."""
    pad_token_id: int = -1
    adjustments: list[str] = field(default_factory=list)
    """One sentence a change, for people."""


def set_up_chat(
    tokenizer: PreTrainedTokenizerBase, template: str | None, generation_eos_ids: list[int], num_embeddings: int
) -> ChatSetup:
    """Give `tokenizer` template, EOS and pad, in place; check that conversations render and round-trip.

    Args:
        tokenizer: the checkpoint's.
        template: Jinja text in place of the checkpoint's own, or None.
        generation_eos_ids: what the checkpoint's generation_config.json calls ends of a turn.
        num_embeddings: rows of the embedding: no id may reach it.

    Raises:
        ArtifactError: no template, no EOS, ids beyond the embedding, or no round trip.
    """
    if len(tokenizer) > num_embeddings:
        raise ArtifactError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {num_embeddings} rows: some tokens have "
            "no weights. Use the tokenizer that belongs to these weights"
        )
    if template is not None:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise ArtifactError(
            "the checkpoint has no chat template. Add chat_template.jinja to it, or name a file with one in "
            "checkpoint.chat_template"
        )
    setup = ChatSetup(find_eos(tokenizer, generation_eos_ids))
    choose_eos(tokenizer, setup)
    choose_pad(tokenizer, setup, num_embeddings)
    check_round_trip(tokenizer)
    return setup


def eos_ids(value: int | list[int] | None) -> list[int]:
    """Return the value of an `eos_token_id` in a config as a list."""
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]


def find_eos(tokenizer: PreTrainedTokenizerBase, generation_eos_ids: list[int]) -> list[int]:
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return own + [i for i in dict.fromkeys(generation_eos_ids) if i not in own]


def choose_eos(tokenizer: PreTrainedTokenizerBase, setup: ChatSetup) -> None:
    """Make the token that the template writes after an answer the tokenizer's EOS.

    Otherwise a policy would learn to write an end of turn at which its rollouts do not stop.

    Raises:
        ArtifactError: the template writes no special token there and the tokenizer has no EOS either.
    """
    end = end_of_turn_id(tokenizer)
    if end is None and tokenizer.eos_token_id is None:
        raise ArtifactError("neither the chat template nor the tokenizer says how an answer ends: set eos_token")
    if end is None or end == tokenizer.eos_token_id:
        return
    old = tokenizer.eos_token
    tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(end))
    setup.eos_token_ids = [end, *(i for i in setup.eos_token_ids if i != end)]
    setup.adjustments.append(f"eos_token {old!r} -> {tokenizer.eos_token!r}, which the chat template ends answers with")


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the first special token after the probe answer in the rendered chat, or None."""
    answer = PROBE_ANSWER[0]["content"]
    try:
        text = render_chat(tokenizer, [*PROBE_PROMPT, *PROBE_ANSWER], add_generation_prompt=False)
    except DataError as error:
        raise ArtifactError(str(error)) from error
    if answer not in text:
        raise ArtifactError(f"the chat template does not render the assistant's words; it gives {text!r}")
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    rest = tokenize_text(tokenizer, text[text.rindex(answer) + len(answer) :])
    return next((i for i in rest if i in special.values()), None)


def choose_pad(tokenizer: PreTrainedTokenizerBase, setup: ChatSetup, num_embeddings: int) -> None:
    """Give the tokenizer a pad token that is no end of turn, without growing the embedding.

    Raises:
        ArtifactError: no token is left for it.
    """
    taken = set(setup.eos_token_ids)
    old = tokenizer.pad_token
    if tokenizer.pad_token_id is None or int(tokenizer.pad_token_id) in taken:
        vocabulary = tokenizer.get_vocab()
        candidates = [t for t in (*PAD_CANDIDATES, tokenizer.unk_token) if t in vocabulary]
        free = [t for t in candidates if vocabulary[t] not in taken]
        if free:
            tokenizer.pad_token = free[0]
        elif len(tokenizer) < num_embeddings:
            # A row of the embedding that no token uses yet.
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        else:
            raise ArtifactError(
                f"pad and end-of-turn token are the same ({old!r}) and the vocabulary has no other token for padding. "
                "Set pad_token in tokenizer_config.json to a token that the model never writes"
            )
        setup.adjustments.append(f"pad_token {old!r} -> {tokenizer.pad_token!r}, since it must not end a turn")
    setup.pad_token_id = int(tokenizer.pad_token_id)


def check_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check on a short conversation that ids and text agree.

    Raises:
        ArtifactError: two BOS tokens, prompt ids that are no prefix of the conversation's, an answer without EOS, or
            ids that do not decode to the rendered text.
    """
    try:
        prompt_ids = encode_prompt(tokenizer, PROBE_PROMPT)
        ids, num_prompt_tokens = encode_conversation(tokenizer, PROBE_PROMPT, PROBE_ANSWER)
    except DataError as error:
        raise ArtifactError(f"the chat template cannot be used: {error}") from error
    text = render_chat(tokenizer, [*PROBE_PROMPT, *PROBE_ANSWER], add_generation_prompt=False)
    if tokenize_text(tokenizer, text)[: len(prompt_ids)] != prompt_ids or num_prompt_tokens != len(prompt_ids):
        raise ArtifactError("the ids of a rendered conversation do not start with the ids of its rendered prompt")
    if ids[-1] != tokenizer.eos_token_id or tokenizer.eos_token_id in ids[num_prompt_tokens:-1]:
        raise ArtifactError("a rendered answer does not end with exactly one EOS token")
    decoded = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # Sentencepiece tokenizers move spaces around special tokens; words must survive.
    words, rendered = "".join(decoded.split()), "".join(text.split())
    if (
        not rendered.startswith(words.removesuffix(str(tokenizer.eos_token)))
        or PROBE_ANSWER[0]["content"] not in decoded
    ):
        raise ArtifactError(f"the tokenizer does not round-trip: {text!r} came back as {decoded!r}")
