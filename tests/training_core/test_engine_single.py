"""AdamW over master weights: schedule, clipping, divergence, state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from training_core.config.optimizer import ConstantSchedule, CosineSchedule, LinearSchedule, OptimizerConfig
from training_core.engines.schedule import learning_rate_factor
from training_core.engines.single import ParameterGroup, SingleProcessEngine, global_norm, group_of
from training_core.errors import ArtifactError, ConfigurationError, TrainingDivergedError


def make_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_engine(module: nn.Module, num_steps: int = 6, **options: object) -> SingleProcessEngine:
    config = OptimizerConfig(**{"learning_rate": 0.05, **options})  # type: ignore[arg-type]
    return SingleProcessEngine([group_of("policy", module, config.learning_rate)], config, num_steps)


def train(engine: SingleProcessEngine, module: nn.Module, first: int, last: int) -> None:
    for step in range(first, last + 1):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        (module(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        engine.step(step)


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def test_step_equals_plain_adamw() -> None:
    module, reference = make_module(), make_module()
    engine = make_engine(module, weight_decay=0.1, max_grad_norm=1e9)
    matrices = [p for p in reference.parameters() if p.ndim == 2]
    vectors = [p for p in reference.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    train(engine, module, 1, 3)
    for step in range(1, 4):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (reference(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(weights(module), weights(reference), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_groups_have_their_own_rate() -> None:
    backbone, head = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    before = weights(backbone)
    config = OptimizerConfig(learning_rate=0.0)
    groups = [group_of("backbone", backbone, 0.0), ParameterGroup("head", dict(head.named_parameters()), 0.1)]
    engine = SingleProcessEngine(groups, config, num_steps=1)
    head_before = weights(head)
    head(backbone(torch.ones(1, 2))).sum().backward()
    assert engine.step(1).learning_rate == 0.0
    assert torch.equal(weights(backbone)[0], before[0])
    # Adam's first step is the learning rate in each coordinate.
    assert torch.allclose((weights(head)[0] - head_before[0]).abs(), torch.full((1, 2), 0.1), atol=1e-4)


def test_clipping_scales_to_the_bound_and_reports_the_norm_before_it() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    config = OptimizerConfig(learning_rate=0.1, max_grad_norm=1.0)
    engine = SingleProcessEngine([ParameterGroup("p", {"x": parameter}, 0.1)], config, num_steps=1)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert engine.step(1).grad_norm == pytest.approx(5.0)
    moment = engine.optimizer.state[parameter]["exp_avg"]
    assert torch.allclose(moment, 0.1 * torch.tensor([0.6, 0.8]))
    assert parameter.grad is None


def test_norm_is_exact_for_many_small_and_huge_values() -> None:
    assert global_norm([torch.full((3_000_000,), 1e-3)]) == pytest.approx(math.sqrt(3.0), rel=1e-5)
    assert global_norm([torch.tensor([3e30]), torch.tensor([4e30])]) == pytest.approx(5e30)
    assert global_norm([]) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_before_the_step(value: float) -> None:
    module = make_module()
    engine = make_engine(module)
    before = weights(module)
    train_loss = module(torch.ones(1, 4)).sum()
    train_loss.backward()
    engine.parameters["policy.2.bias"].grad.fill_(value)  # type: ignore[union-attr]
    with pytest.raises(TrainingDivergedError, match=r"step 1.*policy\.2\.bias"):
        engine.step(1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))


def test_stopped_and_continued_gives_the_same_bits(tmp_path: Path) -> None:
    whole = make_module()
    train(make_engine(whole, weight_decay=0.01, schedule=CosineSchedule(warmup_steps=2)), whole, 1, 6)
    part = make_module()
    engine = make_engine(part, weight_decay=0.01, schedule=CosineSchedule(warmup_steps=2))
    train(engine, part, 1, 3)
    engine.save(tmp_path, step=3)
    other = make_module(seed=9)
    engine = make_engine(other, weight_decay=0.01, schedule=CosineSchedule(warmup_steps=2))
    assert engine.load(tmp_path) == 3
    train(engine, other, 4, 6)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(other), strict=True))


def test_tied_parameters_are_saved_and_trained_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

    module = Tied()
    engine = make_engine(module)
    module.second(module.first(torch.ones(1, 3))).sum().backward()
    engine.step(1)
    engine.save(tmp_path, step=1)
    assert list(engine.parameters) == ["policy.first.weight"]
    assert engine.load(tmp_path) == 1


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "engine.json"]
)
def test_a_missing_part_of_the_state_is_an_error(tmp_path: Path, name: str) -> None:
    module = make_module()
    engine = make_engine(module)
    train(engine, module, 1, 1)
    engine.save(tmp_path, step=1)
    (tmp_path / name).unlink()
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        make_engine(make_module()).load(tmp_path)


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    module = make_module()
    engine = make_engine(module)
    train(engine, module, 1, 1)
    engine.save(tmp_path, step=1)
    with pytest.raises(ArtifactError, match="differ in"):
        make_engine(nn.Linear(4, 8)).load(tmp_path)
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    with pytest.raises(ArtifactError, match="shape"):
        make_engine(other).load(tmp_path)


def test_impossible_engines_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="warmup_steps is 9"):
        make_engine(make_module(), schedule=LinearSchedule(warmup_steps=9))
    with pytest.raises(ValueError, match="float32"):
        make_engine(make_module().bfloat16())
    module = make_module()
    with pytest.raises(ValueError, match="already trained"):
        SingleProcessEngine(
            [group_of("a", module, 0.1), group_of("b", module, 0.1)], OptimizerConfig(learning_rate=0.1), 1
        )
    with pytest.raises(ValueError, match="no trainable"):
        make_engine(make_module().requires_grad_(False))
    with pytest.raises(ValueError, match="autocast"):
        SingleProcessEngine([group_of("a", make_module(), 0.1)], OptimizerConfig(learning_rate=0.1), 1, "float16")


def test_autocast_runs_matrix_products_in_bfloat16() -> None:
    module = make_module()
    config = OptimizerConfig(learning_rate=0.1)
    engine = SingleProcessEngine([group_of("a", module, 0.1)], config, 1, "bfloat16")
    with engine.autocast():
        assert module(torch.ones(1, 4)).dtype == torch.bfloat16
    with make_engine(module).autocast():
        assert module(torch.ones(1, 4)).dtype == torch.float32


@given(st.integers(1, 40), st.integers(0, 40), st.floats(0, 1))
def test_schedules_rise_then_fall_between_their_bounds(num_steps: int, warmup: int, final: float) -> None:
    warmup = min(warmup, num_steps)
    for schedule in (
        ConstantSchedule(warmup_steps=warmup),
        LinearSchedule(warmup_steps=warmup, final_fraction=final),
        CosineSchedule(warmup_steps=warmup, final_fraction=final),
    ):
        factors = [learning_rate_factor(schedule, step, num_steps) for step in range(1, num_steps + 1)]
        full = max(warmup, 1) - 1
        assert factors[full] == pytest.approx(1.0)
        assert factors[: full + 1] == sorted(factors[: full + 1])
        assert all(a >= b - 1e-12 for a, b in zip(factors[full:], factors[full + 1 :], strict=False))
        assert all(0 < f <= 1 + 1e-12 for f in factors)


def test_schedules_reduce_to_constant_and_reject_other_steps() -> None:
    for schedule in (LinearSchedule(final_fraction=1.0), CosineSchedule(final_fraction=1.0)):
        assert [learning_rate_factor(schedule, step, 3) for step in (1, 2, 3)] == pytest.approx([1, 1, 1])
    with pytest.raises(ValueError, match=r"1\.\.3"):
        learning_rate_factor(ConstantSchedule(), 0, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": "1e-6"}, "valid number"),
        ({"learning_rate": -1e-6}, "greater than or equal to 0"),
        ({"learning_rate": 1e-6, "schedule": {"kind": "linear", "final_fraction": 1.5}}, "less than or equal to 1"),
        ({"learning_rate": 1e-6, "schedule": {"kind": "constant", "final_fraction": 0.5}}, "not permitted"),
        ({"learning_rate": 1e-6, "momentum": 0.9}, "not permitted"),
        ({}, "learning_rate"),
    ],
)
def test_impossible_optimizer_configs_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig.model_validate(values)
