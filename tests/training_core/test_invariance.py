"""The invariance law: the gradient of an optimizer step is the same however its answers are laid out.

Over every registered loss, aggregation and term: the split into micro-batches, padding width and side, packing, shared
prompts, the order of rows, and the number of ranks change nothing, in float64 to 1e-12.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from invariance import (
    GROUP_SIZE,
    GROUPS,
    Gradients,
    WiderLayout,
    build_config,
    build_scored,
    build_step_signal,
    build_updater,
    gradients_of,
    left_padding,
    permuted,
    spoiled,
    widened,
)

from training_core.registries import AGGREGATIONS, KL_LOSSES, POLICY_LOSSES
from training_core.rl.layouts import Layout

RELATIVE = 1e-12
WIDE = {"clip_low": 0.5, "clip_high": 0.6}
LOSSES: dict[str, dict[str, Any]] = {
    "clipped_surrogate": {**WIDE, "dual_clip": 1.5},
    "reinforce": {},
    "importance_weighted": {},
    "sequence_surrogate": WIDE,
    "gspo": WIDE,
    "gspo_token": WIDE,
    "cispo": WIDE,
    "sapo": {},
}
AGGREGATION_KNOBS: dict[str, dict[str, Any]] = {"constant": {"num_tokens": 5}}
KL_OBJECTIVES = {"k3": "forward", "abs": "penalty"}
CRITIC = {"initialise_from": "policy", "optimizer": {"learning_rate": 1.0}, "value_clip": 0.5}
TERMS: dict[str, dict[str, Any]] = {
    "policy": {},
    "entropy": {"entropy_coefficient": 0.2},
    "correction_token": {"importance_correction": {"mode": "truncate", "high": 1.2}},
    "correction_answer": {"importance_correction": {"mode": "mask", "level": "sequence", "low": 0.2, "high": 9.0}},
    "auxiliary": {"experts": {"auxiliary_coefficient": 0.2, "z_coefficient": 0.5}},
    "routing_replayed": {"experts": {"auxiliary_coefficient": 0.2, "replay": True}},
    "kl_reward": {"kl": {"placement": "reward", "coefficient": 0.3}},
    "value": {"critic": CRITIC, "advantage": {"kind": "gae", "discount": 0.9}},
    **{
        f"kl_{name}": {
            "kl": {
                "placement": "loss",
                "coefficient": 0.3,
                "estimator": name,
                "objective": KL_OBJECTIVES.get(name, "reverse"),
            }
        }
        for name in KL_LOSSES
    },
}


def cases() -> list[tuple[str, str, str]]:
    """Every loss with every aggregation, and every further term with every aggregation."""
    plain = [(loss, kind, "policy") for loss in POLICY_LOSSES for kind in AGGREGATIONS]
    # On answers whose ratio is not 1, `reinforce` is refused, so terms stand beside the clipped surrogate.
    return plain + [("clipped_surrogate", kind, term) for kind in AGGREGATIONS for term in TERMS if term != "policy"]


def config_of(case: tuple[str, str, str]) -> Any:
    loss, kind, term = case
    aggregation = {"kind": kind, **AGGREGATION_KNOBS.get(kind, {})}
    return build_config({"kind": loss, **LOSSES[loss]}, aggregation, **TERMS[term])


def assert_same(found: Gradients, expected: Gradients, what: str) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-4, "a gradient of zero proves nothing"
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=RELATIVE, atol=RELATIVE * scale, msg=lambda text, n=name: f"{what}, {n}: {text}"
        )


def test_every_registered_name_is_among_the_cases() -> None:
    assert set(LOSSES) == set(POLICY_LOSSES)
    assert {name.removeprefix("kl_") for name in TERMS if name.startswith("kl_")} == {*KL_LOSSES, "reward"}


@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_gradients_do_not_depend_on_how_answers_are_laid_out(
    case: tuple[str, str, str], on_ranks: dict[int, dict[str, Gradients]]
) -> None:
    config, scored = config_of(case), build_scored()
    number = GROUPS * GROUP_SIZE
    updater = build_updater(config)
    updater.layout = Layout("padded", number, None)
    signal = build_step_signal(updater, scored)
    expected = gradients_of(updater, signal, range(number))
    layouts = {
        "one answer a pass": Layout("padded", 1, None),
        "four answers a pass": Layout("padded", 4, None),
        "a budget of tokens": Layout("padded", number, 24),
        "packed": Layout("packed", 4, None),
        "packed, a budget of tokens": Layout("packed", number, 17),
        "shared prompts": Layout("shared_prompt", 2, None),
        "all with shared prompts": Layout("shared_prompt", number, None),
        "wider": WiderLayout("padded", 5, None),
    }
    for what, layout in layouts.items():
        updater.layout = layout
        assert_same(gradients_of(updater, build_step_signal(updater, scored), range(number)), expected, what)
    updater.layout = Layout("padded", 4, None)
    # Padding on the left is nothing that training does; experts are looked up where its own layouts have tokens.
    with left_padding() if config.experts is None else nullcontext():
        assert_same(gradients_of(updater, build_step_signal(updater, scored), range(number)), expected, "left padding")
    wide = build_step_signal(updater, widened(scored, 2))
    assert_same(gradients_of(updater, wide, range(number)), expected, "wider tensors of the step")
    assert_same(gradients_of(updater, spoiled(signal), range(number)), expected, "no number under the mask")
    order = [5, 0, 8, 3, 1, 7, 2, 6, 4]
    shuffled = build_step_signal(updater, permuted(scored, order))
    assert_same(gradients_of(updater, shuffled, range(number)), expected, "another order")
    for num_ranks, found in on_ranks.items():
        assert_same(found["-".join(case)], expected, f"{num_ranks} ranks")


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Gradients]]:
    """Gradients of every case over 2 and 3 real ranks with unequal numbers of tokens, by number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(cases()))
    script = Path(__file__).parents[1] / "scripted" / "invariance_rank.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder), str(Path(__file__))]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors
    found: dict[int, dict[str, Gradients]] = torch.load(folder / "gradients.pt")
    return found
