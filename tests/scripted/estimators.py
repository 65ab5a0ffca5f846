"""Random steps for tests of advantage estimators, and a table of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from training_core.ops import advantages
from training_core.ops.advantages import Advantages, EstimatorInputs

ESTIMATORS: dict[str, Callable[[EstimatorInputs], Advantages]] = {
    "group_normalised": advantages.group_normalised,
    "group_centred": advantages.group_centred,
    "leave_one_out": advantages.leave_one_out,
    "reinforce_plus_plus": lambda inputs: advantages.reinforce_plus_plus(inputs, discount=0.9),
    "reinforce_plus_plus_baseline": lambda inputs: advantages.reinforce_plus_plus_baseline(inputs, discount=0.9),
    "remax": lambda inputs: advantages.remax(inputs, discount=0.9),
    "gae": lambda inputs: advantages.gae(inputs, discount=0.9, smoothing=0.8, whiten=False),
    "gae_whitened": lambda inputs: advantages.gae(inputs, discount=0.9, smoothing=0.8, whiten=True),
}
"""Every estimator with knobs at which all of its parts matter."""

ROW_FIELDS = ("scores", "present", "group_ids", "baseline_scores")
TOKEN_FIELDS = ("mask", "kl_penalties", "values")


def random_inputs(seed: int, num_rows: int = 7, num_tokens: int = 5, **changes: Any) -> EstimatorInputs:
    """Return a step with holes in masks, missing scores and baselines, perhaps empty answers; NaN where nothing is."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def coin(probability: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < probability

    present, mask = coin(0.8, num_rows), coin(0.6, num_rows, num_tokens)
    holes = torch.where(mask & present[:, None], 0.0, math.nan)
    plain = {
        "scores": torch.where(present, normal(num_rows), math.nan),
        "present": present,
        "group_ids": torch.randint(0, 3, (num_rows,), generator=generator) * 7,
        "mask": mask,
        "kl_penalties": 0.3 * normal(num_rows, num_tokens) + holes,
        "values": normal(num_rows, num_tokens) + holes,
        "baseline_scores": torch.where(coin(0.8, num_rows), normal(num_rows), math.nan),
    }
    return EstimatorInputs(**{**plain, **changes})


def changed(inputs: EstimatorInputs, **changes: Any) -> EstimatorInputs:
    """Return the inputs with some fields replaced."""
    return EstimatorInputs(**{**{field.name: getattr(inputs, field.name) for field in fields(inputs)}, **changes})


def one_token(scores: list[float | None], groups: list[int], **changes: Any) -> EstimatorInputs:
    """Return answers of one token each; None is an answer without a score."""
    present = torch.tensor([score is not None for score in scores])
    values = torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float64)
    plain = {"mask": torch.ones(len(scores), 1, dtype=torch.bool), "kl_penalties": None}
    return EstimatorInputs(values, present, torch.tensor(groups), **{**plain, **changes})
