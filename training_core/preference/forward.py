"""Log-probabilities of whole answers, without a [batch, time, vocabulary] tensor.

Shapes: B rows (prompt + answer), L the longest of them, t the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.rl.forward import Precision, answer_logprobs, check_forward_pass
from training_core.rollout.batch import MicroBatch, micro_batch_of


@dataclass(frozen=True)
class PromptedAnswer:
    """Token ids of a prompt and an answer to it."""

    ids: list[int]
    num_prompt_tokens: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class AnswerScorer:
    """A model and how it is run; `logprobs` is the one way in which this room asks for log-probabilities."""

    model: PreTrainedModel
    pad_token_id: int
    precision: Precision

    def logprobs(self, answers: Sequence[PromptedAnswer]) -> Tensor:
        """Return the log-probability of each answer given its prompt, [B] float64 in nats, in one forward pass.

        It is the sum over the answer's tokens, its end included. The gradient flows to the model's weights.
        """
        micro = answer_batch(answers, self.pad_token_id, self.precision.device)
        # The temperature is 1: preferences are about the model's own distribution.
        token_logprobs, _ = answer_logprobs(self.model, micro, 1.0, self.precision, with_entropy=False)
        return token_logprobs.double().sum(dim=1)

    def check(self, answers: Sequence[PromptedAnswer]) -> None:
        """Check on a few answers that these are the log-probabilities of the model's own logits.

        Raises:
            ConfigurationError: they are not; such a model cannot be trained here.
        """
        check_forward_pass(self.model, answer_batch(answers, self.pad_token_id, self.precision.device))


def answer_batch(answers: Sequence[PromptedAnswer], pad_token_id: int, device: torch.device) -> MicroBatch:
    """Return the answers as a micro-batch, its rows numbered in their order."""
    sequences = [answer.ids for answer in answers]
    prompts = [answer.num_prompt_tokens for answer in answers]
    return micro_batch_of(range(len(answers)), sequences, prompts, pad_token_id, device)
