"""Configs of algorithms that learn from preferences: what is accepted, and that every knob reaches its loss."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
from preference_data import make_config
from pydantic import ValidationError

from training_core.config.preference import (
    CustomPairLoss,
    DpoConfig,
    HingeLoss,
    IpoLoss,
    KtoConfig,
    PreferenceStageConfig,
    RobustLoss,
    SigmoidLoss,
    SimpoLoss,
)
from training_core.preference.losses import PREFERENCE_LOSSES

LOSS_CONFIGS = (SigmoidLoss, RobustLoss, IpoLoss, HingeLoss, SimpoLoss)


def test_each_loss_config_has_the_knobs_of_its_function_and_no_others() -> None:
    kinds = {}
    for config in LOSS_CONFIGS:
        (kind,) = get_args(config.model_fields["kind"].annotation)
        kinds[kind] = set(config.model_fields) - {"kind"}
    functions = {
        name: {p.name for p in inspect.signature(loss).parameters.values() if p.kind == p.KEYWORD_ONLY}
        for name, loss in PREFERENCE_LOSSES.items()
    }
    assert kinds == functions


@pytest.mark.parametrize("config", [*LOSS_CONFIGS, CustomPairLoss, DpoConfig, KtoConfig, PreferenceStageConfig])
def test_every_field_says_what_it_is(config: Any) -> None:
    assert all(field.description for field in config.model_fields.values())


def test_defaults_are_those_of_plain_dpo() -> None:
    config = make_config("dpo").algorithm
    assert config.loss == SigmoidLoss(beta=0.1, label_smoothing=0.0, length_normalised=False)
    assert (config.sft_weight, config.needs_reference, config.lora) == (0.0, True, None)
    assert not make_config("dpo", loss={"kind": "simpo"}).algorithm.needs_reference
    assert make_config("kto").algorithm.needs_reference
    own = {"kind": "custom", "import_path": "module:name"}
    assert make_config("dpo", loss=own).algorithm.needs_reference
    assert not make_config("dpo", loss={**own, "uses_reference": False}).algorithm.needs_reference


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {"micro_batch_size": 9}, "must not be larger than batch_size"),
        ("dpo", {"loss": {"kind": "sigmoid", "label_smoothing": 0.5}}, "less than 0.5"),
        ("dpo", {"loss": {"kind": "robust"}}, "label_smoothing"),
        ("dpo", {"loss": {"kind": "simpo", "label_smoothing": 0.1}}, "Extra inputs"),
        ("dpo", {"loss": {"kind": "sigmoid", "beta": 0.0}}, "greater than 0"),
        ("dpo", {"desirable_weight": 2.0}, "Extra inputs"),
        ("kto", {"loss": {"kind": "sigmoid"}}, "Extra inputs"),
        ("kto", {"undesirable_weight": -1.0}, "greater than or equal to 0"),
        ("dpo", {"loss": {"kind": "custom", "import_path": "no path"}}, "match pattern"),
        ("orpo", {}, "'dpo', 'kto'"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(name, **options)


def test_a_config_survives_the_spec() -> None:
    for config in (make_config("dpo", loss={"kind": "ipo"}, lora={"rank": 4}), make_config("kto")):
        assert PreferenceStageConfig.model_validate(config.model_dump(mode="json")) == config
