"""What the stage `reward_model` is given by the data checks, and that a model that is not accepted costs no RL."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_stages.chain import config_of, plan, run

from tasks.plans import PlanState
from tasks.runs import StageState, find_run
from training_core.errors import EvaluationError
from training_core.protocol.digests import path_digest
from training_core.records import StageSpec

BASELINES = {"check_data": {"files": {"baselines.json": json.dumps({"validation_longest_accuracy": 0.6})}}}


def spec_of(scripted: Any, pipeline: Any, stage: str) -> StageSpec:
    return StageSpec.load(scripted.root / str(pipeline.record.stages[stage].directory) / "spec.json")


def test_null_baselines_are_an_input_and_the_rest_of_the_report_is_none(scripted) -> None:  # type: ignore[no-untyped-def]
    scripted.script(BASELINES)
    pipeline = run(scripted)
    inputs = spec_of(scripted, pipeline, "reward_model").inputs
    assert set(inputs) == {"model", "train_pairs", "validation_pairs", "baselines"}
    folder = scripted.root / str(pipeline.record.stages["check_data"].directory)
    assert inputs["baselines"].path == str(folder / "outputs" / "baselines.json")
    assert inputs["baselines"].sha256 == path_digest(folder / "outputs" / "baselines.json")
    assert "baselines" not in spec_of(scripted, pipeline, "policy").inputs


def test_data_without_them_give_none(scripted) -> None:  # type: ignore[no-untyped-def]
    assert set(spec_of(scripted, run(scripted), "reward_model").inputs) == {"model", "train_pairs", "validation_pairs"}


def test_what_it_takes_to_be_accepted_is_part_of_the_stage(scripted) -> None:  # type: ignore[no-untyped-def]
    run(scripted)
    line = plan(scripted, "reward_model.acceptance.on_failure=warn")["reward_model"]
    assert line.state is PlanState.RUNS
    assert line.why == "reward_model.acceptance.on_failure: 'stop' -> 'warn'"
    assert config_of(scripted).reward_model.acceptance.margin == 0.02


def test_a_model_that_is_not_accepted_is_trained_against_by_nothing(scripted) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"reward_model": {"raise": ["EvaluationError", "the reward model is not accepted: it guesses"]}})
    with pytest.raises(EvaluationError) as caught:
        run(scripted)
    assert caught.value.exit_code == 3
    record = find_run(scripted.root, "latest")
    assert record.stages["reward_model"].state is StageState.FAILED
    assert "policy" not in record.stages or record.stages["policy"].state is StageState.PENDING
    assert not (scripted.root / "stages" / "policy").exists()
