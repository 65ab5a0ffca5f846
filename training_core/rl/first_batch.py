"""Checks of the first batch of a process (a new run or a resumed one), before anything is learned from it. Each names
what is wrong and stops the run.

They compare what training is about to use with what it must be, computed again in the plainest way: scores sit on the
last answer token, the other tokens' rewards are the KL term alone, the mask covers answers and nothing else, and a
log-probability does not depend on what else is in the batch. That the untrained policy is at distance 0 from its
reference is checked with the step's comparisons (rl/metrics.py).

Shapes: N answers of the step, T longest answer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.errors import ArtifactError, ConfigurationError, EvaluationError
from training_core.ops.returns import token_rewards
from training_core.rl.forward import Precision, answer_logprobs, check_forward_pass
from training_core.rl.layouts import Layout
from training_core.rl.signal import ScoredBatch
from training_core.rollout.batch import MicroBatch, TrajectoryBatch

HERE = "first batch of this process"
"""A resumed run's is not that of the run."""
MAX_BATCH_DIFFERENCE_NATS = 1e-3
"""A log-prob in float32 may differ by this much between batches: sums in another order."""
MAX_REWARD_DIFFERENCE = 1e-9
"""Rewards are float64 sums of two numbers; of larger ones than 1 it is a share."""


def check_model_on(model: PreTrainedModel, layout: Layout, batch: TrajectoryBatch, pad_token_id: int) -> None:
    """Check forward passes on an answer to the shortest and one to the longest prompt.

    Raises:
        ArtifactError: a mask does not cover its answer.
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
    if layout.max_rows > 1:
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
                f"{HERE}: the mask of answer {row} does not cover its {len(answer)} tokens and nothing else. "
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
            f"{HERE}: in {type(model).__name__}, log-probs of an answer change by up to {worst:.4f} nats a token "
            f"when another answer is in its batch (rounding: at most {MAX_BATCH_DIFFERENCE_NATS}), so ratios would "
            "measure the batch. Set algorithm.micro_batch_size: 1, or use a model that keeps the rows of a batch apart"
        )


def check_scored(scored: ScoredBatch, kl_penalties: Tensor | None) -> None:
    """Check masks, groups and where rewards sit.

    Raises:
        ArtifactError: a mask does not follow its answer's length, or a group is not the answers to one prompt.
        EvaluationError: a reward is not where it belongs.
    """
    batch = scored.batch
    lengths = torch.tensor([len(answer) for answer in batch.answers])
    expected = torch.arange(batch.mask.shape[1])[None, :] < lengths[:, None]
    if not torch.equal(batch.mask, expected):
        row = int((batch.mask != expected).any(dim=1).nonzero()[0])
        raise ArtifactError(
            f"{HERE}: answer {row} has {int(lengths[row])} tokens, its mask marks {int(batch.mask[row].sum())} "
            "slots or others than the first. Training would learn from other tokens than the policy chose"
        )
    prompt_of: dict[int, tuple[int, ...]] = {}
    for group, prompt in zip(scored.group_ids.tolist(), batch.prompts, strict=True):
        if prompt_of.setdefault(group, prompt) != prompt:
            raise ArtifactError(
                f"{HERE}: group {group} holds answers to different prompts, so their scores would be compared "
                "with each other"
            )
    check_rewards(scored, kl_penalties)


def check_rewards(scored: ScoredBatch, kl_penalties: Tensor | None) -> None:
    """Check that each score is the reward of its answer's last token, and the KL term of every token's own.

    Raises:
        EvaluationError: they are not.
    """
    mask = scored.batch.mask
    found = token_rewards(scored.scores, scored.present, mask, kl_penalties)
    lengths = torch.tensor([len(answer) for answer in scored.batch.answers])
    counted = (torch.arange(mask.shape[1])[None, :] < lengths[:, None]) & scored.present[:, None]
    wanted = torch.zeros(mask.shape, dtype=torch.float64)
    rows = (scored.present & (lengths > 0)).nonzero()[:, 0]
    wanted[rows, lengths[rows] - 1] = scored.scores[rows].double()
    if kl_penalties is not None:
        wanted -= kl_penalties.double().where(counted, 0.0)
    allowed = MAX_REWARD_DIFFERENCE * torch.maximum(found.abs(), wanted.abs()).clamp(min=1.0)
    is_wrong = ~(found.isfinite() & ((found - wanted).abs() <= allowed))
    if not bool(is_wrong.any()):
        return
    row, slot = is_wrong.nonzero()[0].tolist()
    length = int(lengths[row])
    where = f"token {slot + 1} of {length}" if slot < length else f"slot {slot + 1}, padding,"
    raise EvaluationError(
        f"{HERE}: the reward of {where} of answer {row} is {float(found[row, slot]):.6f} and must "
        f"be {float(wanted[row, slot]):.6f}: the last token has the score, and each token its own KL term"
    )
