"""The first batch of a run is checked: each fault stops it with the reason, a right one passes, for two rows' work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tasks import build_small_checkpoint, small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from training_core.errors import ArtifactError, ConfigurationError, EvaluationError
from training_core.models.loading import load_causal_lm
from training_core.ops.returns import token_rewards
from training_core.rl import first_batch, update
from training_core.rl.first_batch import check_model_on, check_scored, check_targets
from training_core.rl.layouts import Layout
from training_core.rl.signal import ScoredBatch
from training_core.rl.trainer import PolicyTrainer
from training_core.rollout.batch import TrajectoryBatch, build_batch

CPU = torch.device("cpu")
PROMPTS = ((5, 6), (7, 8, 9, 10))
ANSWERS = ((21,), (22, 23, 24), (25, 26), (27, 28, 29))
LAYOUTS = ("padded", "packed", "shared_prompt")


def right_batch() -> TrajectoryBatch:
    return build_batch([PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, ANSWERS, [[-1.0] * len(answer) for answer in ANSWERS])


def right_scored(**changes: Any) -> ScoredBatch:
    """Return two groups of two answers, the third without a score."""
    scored = ScoredBatch(
        batch=right_batch(),
        scores=torch.tensor([1.0, -2.0, torch.nan, 0.5], dtype=torch.float64),
        present=torch.tensor([True, True, False, True]),
        is_truncated=torch.zeros(4, dtype=torch.bool),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    return replace(scored, **changes)


def penalties() -> Tensor:
    """Return the KL term of each token; anything where nothing counts."""
    values = torch.arange(12, dtype=torch.float64).reshape(4, 3) / 10 + 0.1
    return values.where(right_batch().mask & torch.tensor([True, True, False, True])[:, None], torch.nan)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("kl", [None, penalties()], ids=["without KL", "with KL"])
def test_a_right_step_passes(kl: Tensor | None) -> None:
    check_scored(right_scored(), kl)


Rewards = Callable[..., Tensor]


def moved(where: Callable[[Tensor], Tensor]) -> Rewards:
    """Return `token_rewards` with the score elsewhere."""

    def wrong(scores: Tensor, present: Tensor, mask: Tensor, kl: Tensor | None) -> Tensor:
        found = -kl.where(mask & present[:, None], 0.0) if kl is not None else torch.zeros(mask.shape).double()
        found[torch.arange(len(scores)), where(mask)] += scores.where(present, 0.0)
        return found

    return wrong


def shifted_kl(scores: Tensor, present: Tensor, mask: Tensor, kl: Tensor | None) -> Tensor:
    """Return `token_rewards` with each KL term at the token after its own."""
    assert kl is not None
    return token_rewards(scores, present, mask, kl.nan_to_num().roll(1, dims=1))


def missing_as_zero(scores: Tensor, present: Tensor, mask: Tensor, kl: Tensor | None) -> Tensor:
    """Return `token_rewards` that let an answer without a score pay its KL term all the same."""
    assert kl is not None
    return token_rewards(scores.nan_to_num(), torch.ones_like(present), mask, kl.nan_to_num(nan=0.25))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            moved(lambda mask: torch.zeros(4, dtype=torch.long)),
            "token 1 of 3 of answer 1 is -2.400000 and must be -0.4",
        ),
        (moved(lambda mask: torch.full((4,), 2)), "token 1 of 1 of answer 0 is -0.100000 and must be 0.9"),
        (moved(lambda mask: mask.sum(1).clamp(max=2)), "token 1 of 1 of answer 0 is -0.100000 and must be 0.9"),
        (shifted_kl, "token 1 of 1 of answer 0 is 1.0"),
        (missing_as_zero, "token 1 of 2 of answer 2 is -0.250000 and must be 0.0"),
    ],
    ids=["score on the first token", "score in the last slot", "score behind the end", "KL a token late", "missing"],
)
def test_a_reward_elsewhere_stops_the_run(monkeypatch: pytest.MonkeyPatch, wrong: Rewards, words: str) -> None:
    monkeypatch.setattr(first_batch, "token_rewards", wrong)
    with pytest.raises(
        EvaluationError, match=rf"first batch of this process: the reward of {words}.*the last token has the score"
    ):
        check_scored(right_scored(), penalties())


def test_a_second_score_in_the_padding_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(scores: Tensor, present: Tensor, mask: Tensor, kl: Tensor | None) -> Tensor:
        found = token_rewards(scores, present, mask, kl)
        found[0, 2] = scores[0]
        return found

    monkeypatch.setattr(first_batch, "token_rewards", twice)
    with pytest.raises(EvaluationError, match=r"slot 3, padding, of answer 0 is 1\.0+ and must be 0\.0"):
        check_scored(right_scored(), None)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_reward_that_is_no_number_stops_the_run(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def broken(scores: Tensor, present: Tensor, mask: Tensor, kl: Tensor | None) -> Tensor:
        found = token_rewards(scores, present, mask, kl)
        found[3, 1] = value
        return found

    monkeypatch.setattr(first_batch, "token_rewards", broken)
    with pytest.raises(EvaluationError, match=rf"token 2 of 3 of answer 3 is {value} and must be 0\.0"):
        check_scored(right_scored(), None)


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_it_does_not_look_at_tokens_one_by_one() -> None:
    """At 512 answers of 4096 tokens that would take a minute."""
    counts = []
    for size in (2, 40):
        batch = build_batch([(5, 6)] * 4, [tuple(range(size))] * 4, [[-1.0] * size] * 4)
        scored = right_scored(batch=batch, group_ids=torch.zeros(4, dtype=torch.long))
        with Operations() as operations:
            first_batch.check_rewards(scored, torch.ones(4, size, dtype=torch.float64))
        counts.append(operations.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("slot", "marks"), [(1, 2), (0, 0)], ids=["one too long", "one too short"])
def test_a_mask_of_another_length_stops_the_run(slot: int, marks: int) -> None:
    batch = right_batch()
    batch.mask[0, slot] = not batch.mask[0, slot]
    with pytest.raises(ArtifactError, match=f"answer 0 has 1 tokens, its mask marks {marks} slots"):
        check_scored(right_scored(batch=batch), None)


def test_a_group_with_two_prompts_stops_the_run() -> None:
    """Fault 43: group ids that differ from what was sampled."""
    with pytest.raises(ArtifactError, match="group 0 holds answers to different prompts"):
        check_scored(right_scored(group_ids=torch.tensor([0, 1, 0, 1])), None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_model_passes_in_every_layout(small_checkpoint: Path, layout: str) -> None:
    check_model_on(load_causal_lm(small_checkpoint), Layout(layout, 4, None), right_batch(), 0)


@pytest.mark.parametrize("change", [(0,), ()], ids=["one too long", "another token"])
def test_a_micro_batch_with_other_tokens_stops_the_run(change: tuple[int, ...]) -> None:
    """What is laid out is not what was sampled: a pad token counted, or a token that the policy did not choose."""
    batch = right_batch()
    answers = [(*ANSWERS[0], *change) if change else (99,), *ANSWERS[1:]]
    other = build_batch(batch.prompts, answers, [[-1.0] * len(answer) for answer in answers])
    (micro,) = Layout("padded", 4, None).split(other, range(4), 0, CPU)
    with pytest.raises(ArtifactError, match="the mask of answer 0 does not cover its 1 tokens and nothing else"):
        check_targets(micro, batch)


def sees_other_rows(model: PreTrainedModel, by: float = 0.3) -> PreTrainedModel:
    """Let every row's hidden states depend on the batch's mean, as a batch norm would."""
    model.model.norm.register_forward_hook(lambda module, inputs, out: out + by * out.mean(dim=0, keepdim=True))
    return model


def test_a_model_that_sees_the_other_rows_stops_the_run(small_checkpoint: Path) -> None:
    model = sees_other_rows(load_causal_lm(small_checkpoint))
    words = r"in LlamaForCausalLM, log-probs of an answer change by up to 0\.\d+ nats.*micro_batch_size: 1"
    with pytest.raises(ConfigurationError, match=words):
        check_model_on(model, Layout("padded", 4, None), right_batch(), 0)


def test_what_its_message_advises_helps(small_checkpoint: Path) -> None:
    model = sees_other_rows(load_causal_lm(small_checkpoint))
    check_model_on(model, Layout("padded", 1, None), right_batch(), 0)


def test_a_log_prob_that_is_no_number_stops_the_run(small_checkpoint: Path) -> None:
    model = load_causal_lm(small_checkpoint)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ArtifactError, match=r"log-probs that are not finite.*diverged"):
        check_model_on(model, Layout("padded", 4, None), right_batch(), 0)


def test_a_reference_that_is_not_the_start_stops_the_run(
    small_checkpoint: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training_core.rl import stage

    build = stage.build_reference

    def of_other_weights(config: Any, policy: Any) -> Any:
        other = load_causal_lm(small_checkpoint)
        with torch.no_grad():
            other.lm_head.weight.mul_(1.3)
        return build(config, other)

    monkeypatch.setattr(stage, "build_reference", of_other_weights)
    config = small_config(rl_stage, num_steps=1, kl={"placement": "loss", "coefficient": 0.1})
    with pytest.raises(ArtifactError, match=r"step 1: KL\(policy \|\| reference\) is 0\.\d+ nats.*must be 0"):
        rl_stage.run(tmp_path, small_checkpoint, config)


class KilledError(BaseException):
    """What a kill looks like from inside."""


def test_it_runs_once_a_process_on_two_rows_and_again_after_a_resume(
    small_checkpoint: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original, step = update.check_model_on, PolicyTrainer.train_step

    def spy(model: PreTrainedModel, *arguments: Any) -> None:
        rows: list[int] = []
        hook = model.model.register_forward_pre_hook(
            lambda module, inputs, named: rows.append(len(named["input_ids"])), with_kwargs=True
        )
        original(model, *arguments)
        hook.remove()
        seen.append(rows)

    def killing(self: PolicyTrainer, number: int) -> Any:
        record = step(self, number)
        if number == 3:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            raise KilledError
        return record

    monkeypatch.setattr(update, "check_model_on", spy)
    monkeypatch.setattr(update, "check_scored", lambda *arguments: seen.append(arguments[0]))
    config = small_config(rl_stage, num_steps=4, checkpoint_every_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "train_step", killing)
        with pytest.raises(KilledError):
            rl_stage.run(tmp_path / "a", small_checkpoint, config)
    assert len(seen) == 2
    rl_stage.run(tmp_path / "b", small_checkpoint, config)
    assert len(seen) == 4
    for rows, scored in (seen[:2], seen[2:]):
        assert rows
        assert max(rows) <= 2  # Of the 32 answers of a step.
        assert isinstance(scored, ScoredBatch)
