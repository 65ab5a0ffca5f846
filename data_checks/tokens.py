"""Lengths and control tokens by the tokenizer and chat template that training uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_checks.config import CheckDataConfig
from data_checks.rows import FeedbackRow, Finding, PairRow, PromptItem, Reason, StepwiseRow, Turns
from training_core.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TEXTS = 512
NO_LIMIT = 10**12
"""A tokenizer without a limit has a `model_max_length` of about 10**30."""
MARKER = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\]")
"""What an added token that is not flagged special looks like when it steers a model."""


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory, from its files alone.

    Raises:
        ArtifactError: it does not load, or has no chat template or no end-of-turn token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(
            f"the tokenizer in {directory} does not load: {error}. Take the checkpoint in again"
        ) from None
    if tokenizer.chat_template is None:
        raise ArtifactError(
            f"the tokenizer in {directory} has no chat template, so no prompt can be rendered. Name one as "
            "checkpoint.chat_template"
        )
    if tokenizer.eos_token_id is None:
        raise ArtifactError(f"the tokenizer in {directory} has no EOS token, so an answer has no end. Set `eos_token`")
    return tokenizer


@dataclass(frozen=True)
class Limits:
    """The token limits in force."""

    max_prompt_tokens: int
    max_response_tokens: int | None
    max_total_tokens: int
    total_limited_by: str
    """`config` or `tokenizer`."""

    @classmethod
    def of(cls, config: CheckDataConfig, tokenizer: PreTrainedTokenizerBase) -> Limits:
        """Return the config's limits, the total cut to the tokenizer's own."""
        model_limit = tokenizer.model_max_length
        by_tokenizer = model_limit < min(config.max_total_tokens, NO_LIMIT)
        total = int(model_limit) if by_tokenizer else config.max_total_tokens
        who = "tokenizer" if by_tokenizer else "config"
        return cls(config.max_prompt_tokens, config.max_response_tokens, total, who)


Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt and of the answer after it."""


def measure_pairs(
    rows: Sequence[PairRow],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    allowed: Sequence[str],
) -> None:
    """Count the tokens of pairs without findings; add findings for what training cannot use.

    That is: what is too long, holds control tokens, or has the same tokens on both sides.
    """
    usable = [row for row in rows if not row.findings]
    control = ControlTokens(tokenizer, allowed)
    for start in range(0, len(usable), BATCH_TEXTS):
        batch = usable[start : start + BATCH_TEXTS]
        control.mark(batch, [(*row.prompt, *row.chosen, *row.rejected) for row in batch])
        batch = [row for row in batch if not row.findings]
        encoded = encode_conversations(
            tokenizer, [(row.prompt, side) for row in batch for side in (row.chosen, row.rejected)]
        )
        for row, chosen, rejected in zip(batch, encoded[::2], encoded[1::2], strict=True):
            for side, found_in_side in (("chosen", chosen), ("rejected", rejected)):
                if isinstance(found_in_side, Finding):
                    row.findings.append(Finding(found_in_side.reason, found_in_side.detail, side))
            if isinstance(chosen, tuple) and isinstance(rejected, tuple):
                _measure_pair(row, chosen, rejected, limits)


def _measure_pair(row: PairRow, chosen: Encoded, rejected: Encoded, limits: Limits) -> None:
    (prompt_ids, chosen_ids), (_, rejected_ids) = chosen, rejected
    row.prompt_tokens, row.chosen_tokens, row.rejected_tokens = len(prompt_ids), len(chosen_ids), len(rejected_ids)
    row.findings += length_findings(row, limits)
    if chosen_ids == rejected_ids:  # A normalising tokenizer, or a template that trims, may leave no difference.
        row.findings.append(Finding(Reason.IDENTICAL_RESPONSES, "chosen and rejected encode to the same tokens"))


def measure_answers(
    rows: Sequence[FeedbackRow | StepwiseRow],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    allowed: Sequence[str],
) -> None:
    """Do for judged answers what `measure_pairs` does for pairs."""
    usable = [row for row in rows if not row.findings]
    control = ControlTokens(tokenizer, allowed)
    for start in range(0, len(usable), BATCH_TEXTS):
        batch = usable[start : start + BATCH_TEXTS]
        control.mark(batch, [(*row.prompt, *row.answer) for row in batch])
        clean = [row for row in batch if not row.findings]
        encoded = encode_conversations(tokenizer, [(row.prompt, row.answer) for row in clean])
        for row, found in zip(clean, encoded, strict=True):
            if isinstance(found, Finding):
                row.findings.append(found)
                continue
            row.prompt_tokens, row.answer_tokens = map(len, found)
            row.findings += prompt_length_findings(row.prompt_tokens, limits)
            row.findings += answer_length_findings(row.prompt_tokens, row.answer_tokens, limits)


def measure_prompts(
    items: Sequence[PromptItem],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    allowed: Sequence[str],
) -> None:
    """Do for prompts what `measure_pairs` does for pairs."""
    usable = [item for item in items if not item.findings]
    control = ControlTokens(tokenizer, allowed)
    for start in range(0, len(usable), BATCH_TEXTS):
        batch = usable[start : start + BATCH_TEXTS]
        control.mark(batch, [item.prompt for item in batch])
        _measure_prompt_batch([item for item in batch if not item.findings], tokenizer, limits)


def _measure_prompt_batch(items: Sequence[PromptItem], tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
    rendered = [render(tokenizer, item.prompt, add_generation_prompt=True) for item in items]
    ids = iter(encode_all(tokenizer, [text for text in rendered if isinstance(text, str)]))
    for item, text in zip(items, rendered, strict=True):
        if isinstance(text, Finding):
            item.findings.append(text)
            continue
        item.prompt_tokens = len(next(ids))
        item.findings += prompt_length_findings(item.prompt_tokens, limits)


def length_findings(row: PairRow, limits: Limits) -> list[Finding]:
    """Return findings for what is longer than the limits."""
    assert row.prompt_tokens is not None
    findings = prompt_length_findings(row.prompt_tokens, limits)
    for side, tokens in (("chosen", row.chosen_tokens), ("rejected", row.rejected_tokens)):
        assert tokens is not None
        findings += answer_length_findings(row.prompt_tokens, tokens, limits, side)
    return findings


def answer_length_findings(
    prompt_tokens: int, answer_tokens: int, limits: Limits, side: str | None = None
) -> list[Finding]:
    findings = []
    if limits.max_response_tokens is not None and answer_tokens > limits.max_response_tokens:
        detail = f"{answer_tokens} tokens, at most {limits.max_response_tokens}"
        findings.append(Finding(Reason.RESPONSE_TOO_LONG, detail, side))
    if (total := prompt_tokens + answer_tokens) > limits.max_total_tokens:
        findings.append(Finding(Reason.TOO_LONG, f"{total} tokens, at most {limits.max_total_tokens}", side))
    return findings


def prompt_length_findings(num_tokens: int, limits: Limits) -> list[Finding]:
    limit = min(limits.max_prompt_tokens, limits.max_total_tokens)
    if num_tokens <= limit:
        return []
    return [Finding(Reason.PROMPT_TOO_LONG, f"{num_tokens} tokens, at most {limit}")]


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[tuple[Turns, Turns]]
) -> list[Encoded | Finding]:
    """Return for each (prompt, answer) the ids of the prompt and of the answer as training encodes them.

    The prompt includes the opening of the assistant's turn. The answer ends with its EOS token: what the template
    writes after it is left out, and a missing EOS is added.
    """
    results: list[Encoded | Finding] = []
    pairs: list[tuple[str, str] | Finding] = []
    openings: dict[Turns, str | Finding] = {}
    for prompt, answer in conversations:
        if prompt not in openings:
            openings[prompt] = render(tokenizer, prompt, add_generation_prompt=True)
        opening = openings[prompt]
        full = render(tokenizer, prompt + answer, add_generation_prompt=False)
        if isinstance(opening, Finding) or isinstance(full, Finding):
            pairs.append(opening if isinstance(opening, Finding) else full)  # type: ignore[arg-type]
        elif not full.startswith(opening):
            pairs.append(Finding(Reason.TEMPLATE_FAILED, "the template renders the prompt differently with an answer"))
        else:
            pairs.append((opening, full))
    texts = [text for pair in pairs if not isinstance(pair, Finding) for text in pair]
    encoded = iter(encode_all(tokenizer, texts))
    for pair in pairs:
        if isinstance(pair, Finding):
            results.append(pair)
            continue
        prompt_ids, ids = next(encoded), next(encoded)
        if ids[: len(prompt_ids)] == prompt_ids:
            answer_ids = ids[len(prompt_ids) :]
        else:
            answer_ids = encode_all(tokenizer, [pair[1][len(pair[0]) :]])[0]
        results.append((prompt_ids, _end_at_eos(answer_ids, tokenizer.eos_token_id)))
    return results


def _end_at_eos(ids: list[int], eos_token_id: int) -> list[int]:
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] == eos_token_id:
            return ids[: position + 1]
    return [*ids, eos_token_id]


def render(tokenizer: PreTrainedTokenizerBase, turns: Turns, *, add_generation_prompt: bool) -> str | Finding:
    """Return the template's text, or a finding when the template refuses the turns."""
    messages = [turn._asdict() for turn in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except Exception as error:  # A template may raise anything; which rows it refuses is what we are here to find out.
        roles = ", ".join(turn.role for turn in turns)
        return Finding(Reason.TEMPLATE_FAILED, f"{type(error).__name__} for turns with roles [{roles}]")


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, each different text encoded once; no special tokens are added."""
    ids: dict[str, list[int]] = {}
    unique = list(dict.fromkeys(texts))
    for start in range(0, len(unique), BATCH_TEXTS):
        batch = unique[start : start + BATCH_TEXTS]
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids |= zip(batch, encoded["input_ids"], strict=True)
    return [ids[text] for text in texts]


class ControlTokens:
    """Finds control tokens in message texts by what the tokenizer does with them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, allowed: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        special = {
            index: added.get(index, str(tokenizer.convert_ids_to_tokens(index))) for index in tokenizer.all_special_ids
        }
        flagged = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        control = {index: text for index, text in added.items() if index in flagged or MARKER.fullmatch(text)} | special
        self.tokens = {index: text for index, text in control.items() if text not in allowed}

    def mark(
        self, rows: Sequence[PairRow | FeedbackRow | PromptItem | StepwiseRow], conversations: Sequence[Turns]
    ) -> None:
        """Add a finding to each row in whose turns a control token is found."""
        for row, token in zip(rows, self.find(conversations), strict=True):
            if token is not None:
                row.findings.append(Finding(Reason.SPECIAL_TOKENS, f"a message's text encodes to {token}"))

    def find(self, conversations: Sequence[Turns]) -> list[str | None]:
        """Return for each list of turns the first control token that a content, encoded alone, turns into, or None."""
        contents = [turn.content for turns in conversations for turn in turns]
        encoded = iter(encode_all(self._tokenizer, contents))
        results = []
        for turns in conversations:
            found = [self._first(next(encoded), turn.content) for turn in turns]
            results.append(next((token for token in found if token is not None), None))
        return results

    def _first(self, ids: list[int], text: str) -> str | None:
        for index in ids:
            # A character that the vocabulary lacks becomes the unknown token: odd, but it steers nothing.
            if index in self.tokens and (index != self._tokenizer.unk_token_id or self.tokens[index] in text):
                return self.tokens[index]
        return None
