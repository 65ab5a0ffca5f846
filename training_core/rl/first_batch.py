"""Checks of the first batch of a run, before anything is learned from it. Each names what is wrong and stops the run.

They compare what training is about to use with what it must be, computed again in the plainest way: scores sit on the
last answer token, the other tokens' rewards are the KL term alone, the mask covers answers and nothing else, and a
log-probability does not depend on what else is in the batch. That the untrained policy is at distance 0 from its
reference is checked with the step's comparisons (rl/metrics.py).

Shapes: N answers of the step, T longest answer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.errors import ArtifactError, ConfigurationError, EvaluationError
from training_core.ops.returns import token_rewards
from training_core.rl.forward import Precision, answer_logprobs, check_forward_pass
from training_core.rl.layouts import Layout
from training_core.rl.signal import ScoredBatch
from training_core.rollout.batch import MicroBatch, TrajectoryBatch

MAX_BATCH_DIFFERENCE_NATS = 1e-3
"""A log-prob in float32 may differ by this much between batches: sums in another order."""
MAX_REWARD_DIFFERENCE = 1e-9
"""Rewards are float64 sums of two numbers."""


def check_model_on(model: PreTrainedModel, layout: Layout, batch: TrajectoryBatch, pad_token_id: int) -> None:
    """Check forward passes on the answers to the shortest and the longest prompt.

    Raises:
        ConfigurationError: log-probs are not those of the model's logits, or depend on the batch.
    """
    by_prompt = sorted(range(len(batch)), key=lambda row: len(batch.prompts[row]))
    rows = sorted({by_prompt[0], by_prompt[-1]})
    device = next(model.parameters()).device
    # In one pass: what goes wrong with prompts of different length shows only side by side.
    (together,) = Layout(layout.name, len(rows), None).split(batch, rows, pad_token_id, device)
    check_targets(together, batch)
    check_forward_pass(model, together)
    alone = [Layout("padded", 1, None).split(batch, [row], pad_token_id, device)[0] for row in rows]
    check_batch_invariance(model, together, alone)


def check_targets(micro: MicroBatch, batch: TrajectoryBatch) -> None:
    """Check that each row's mask covers its answer and that what is predicted there are its tokens.

    Raises:
        ArtifactError: they are not.
    """
    found = micro.scatter(micro.targets.float()).long().cpu()
    for index, row in enumerate(micro.rows.tolist()):
        answer = torch.tensor(batch.answers[row])
        counted = micro.mask[index].cpu()
        if not (int(counted.sum()) == len(answer) and torch.equal(found[index][counted], answer)):
            raise ArtifactError(
                f"first batch: the mask of answer {row} does not cover its {len(answer)} tokens and nothing else. "
                "Training would learn from other tokens than the policy chose"
            )


@torch.no_grad()
def check_batch_invariance(model: PreTrainedModel, together: MicroBatch, alone: list[MicroBatch]) -> None:
    """Check in float32 that answers have the same log-probs together as each alone.

    Raises:
        ConfigurationError: they do not.
    """
    precision = Precision("none", together.input_ids.device)
    found, _ = answer_logprobs(model, together, 1.0, precision, with_entropy=False)
    place = {row: index for index, row in enumerate(together.rows.tolist())}
    worst = 0.0
    for micro in alone:
        expected, _ = answer_logprobs(model, micro, 1.0, precision, with_entropy=False)
        here = found[place[int(micro.rows[0])]][: expected.shape[1]]
        worst = max(worst, float((here - expected[0]).abs().max()))
    if not worst <= MAX_BATCH_DIFFERENCE_NATS:
        raise ConfigurationError(
            f"first batch: {type(model).__name__} gives the same answer log-probs that differ by {worst:.4f} nats with "
            "what else is in its batch, so ratios would measure the batch. Set algorithm.micro_batch_size: 1, or use a "
            "model whose attention does not see padding"
        )


def check_scored(scored: ScoredBatch, kl_penalties: Tensor | None) -> None:
    """Check masks, groups and where rewards sit.

    Raises:
        ArtifactError: a mask does not follow its answer's length, or a group is not the answers to one prompt.
        EvaluationError: a reward sits on another token than the last, or beside the KL term on others.
    """
    batch = scored.batch
    lengths = torch.tensor([len(answer) for answer in batch.answers])
    expected = torch.arange(batch.mask.shape[1])[None, :] < lengths[:, None]
    if not torch.equal(batch.mask, expected):
        raise ArtifactError("first batch: the mask of answer tokens does not follow the answers' lengths")
    prompt_of: dict[int, tuple[int, ...]] = {}
    for group, prompt in zip(scored.group_ids.tolist(), batch.prompts, strict=True):
        if prompt_of.setdefault(group, prompt) != prompt:
            raise ArtifactError(f"first batch: group {group} holds answers to different prompts")
    rewards = token_rewards(scored.scores, scored.present, batch.mask, kl_penalties)
    for row, length in enumerate(lengths.tolist()):
        for token in range(length):
            penalty = 0.0 if kl_penalties is None else float(kl_penalties[row, token])
            is_scored = token == length - 1 and bool(scored.present[row])
            wanted = (float(scored.scores[row]) if is_scored else 0.0) - penalty
            present = bool(scored.present[row])
            if present and not math.isclose(float(rewards[row, token]), wanted, abs_tol=MAX_REWARD_DIFFERENCE):
                raise EvaluationError(
                    f"first batch: the reward of token {token + 1} of {length} of answer {row} is "
                    f"{float(rewards[row, token]):.6f}, it must be {wanted:.6f}: the score belongs to the last token "
                    "alone, the others have the KL term"
                )
