"""prefect.yaml, work pools and automations: Prefect ignores what it does not know, so it is checked here."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml as prefects_yaml
from prefect import Flow
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel, RawScheduleConfig, WorkPoolConfig
from prefect.events.schemas.automations import AutomationCore
from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger
from ruamel.yaml import YAML

from flows.config import load_pipeline
from tasks.config import OrchestrationConfig, PipelineConfig
from tasks.dispatch import deployment_name
from tasks.planning import CHAIN

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENTS = REPOSITORY / "deployments"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(REPOSITORY / "prefect.yaml")
    return loaded


def known(model: Any) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_prefect_reads_the_same_file(document: dict[str, Any]) -> None:
    """Prefect's YAML reader takes 1e-6 for text and keeps the last of two equal keys."""
    assert prefects_yaml.safe_load((REPOSITORY / "prefect.yaml").read_text()) == document


def test_no_unknown_keys(document: dict[str, Any]) -> None:
    assert set(document) <= known(PrefectYamlModel)
    for deployment in document["deployments"]:
        assert set(deployment) <= known(DeploymentConfig)
        assert set(deployment["work_pool"]) <= known(WorkPoolConfig)
        for schedule in deployment.get("schedules", []):
            assert set(schedule) <= known(RawScheduleConfig)
            RawScheduleConfig.model_validate(schedule)
        for trigger in deployment.get("triggers", []):
            assert set(trigger) <= known(DeploymentEventTrigger)
            DeploymentEventTrigger.model_validate(trigger)
    (pull,) = document["pull"]  # Prefect 3.7.7 cannot deploy without an explicit step.
    assert list(pull) == ["prefect.deployments.steps.set_working_directory"]


def test_every_stage_has_its_deployment_on_its_pool(document: dict[str, Any]) -> None:
    found = {}
    for deployment in document["deployments"]:
        module, function = deployment["entrypoint"].rsplit(".", 1)
        flow = getattr(importlib.import_module(module), function)
        assert isinstance(flow, Flow)
        found[f"{flow.name}/{deployment['name']}"] = deployment["work_pool"]["name"]
    config = PipelineConfig.model_validate(document["deployments"][0]["parameters"]["config"])
    expected = {deployment_name(stage, config): f"tidegate-{stage.pool}" for stage in CHAIN}
    assert found == expected | {"post-training/demo": "tidegate-cpu"}
    # A waiting main flow must not take the place of a stage that it waits for.
    queues = {d["entrypoint"]: d["work_pool"]["work_queue_name"] for d in document["deployments"]}
    main = queues.pop("flows.post_training.post_training")
    assert main not in queues.values()


def test_the_config_is_the_demo_for_workers(document: dict[str, Any]) -> None:
    demo = load_pipeline([REPOSITORY / "examples" / "demo.yaml"])
    for deployment in document["deployments"]:
        config = PipelineConfig.model_validate(deployment["parameters"]["config"])
        assert config.identity() == demo.identity()
        assert config.root == "{{ $TIDEGATE_ROOT }}"
        assert config.orchestration == OrchestrationConfig(mode="deployments")


def test_the_event_and_the_schedule_start_the_whole_chain(document: dict[str, Any]) -> None:
    main, *stages = document["deployments"]
    assert main["triggers"][0]["expect"] == ["tidegate.dataset.updated"]
    assert main["schedules"][0]["cron"]
    assert not any("schedules" in stage or "triggers" in stage for stage in stages)


@pytest.mark.parametrize("pool", ["cpu", "gpu"])
def test_work_pools_refuse_unknown_job_variables(pool: str, document: dict[str, Any]) -> None:
    from prefect.workers.process import ProcessWorker

    template = json.loads((DEPLOYMENTS / "work_pools" / f"{pool}.json").read_text())
    schema = template["variables"]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"env": {"A": "b"}, "working_dir": "/x"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"enw": {"A": "b"}}, schema)
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(schema["properties"])
    assert set(template["job_configuration"]) == set(ProcessWorker.get_default_base_job_template()["job_configuration"])
    for deployment in document["deployments"]:
        jsonschema.validate(deployment["work_pool"].get("job_variables", {}), schema)


def test_automations_are_valid() -> None:
    files = sorted((DEPLOYMENTS / "automations").glob("*.yaml"))
    assert files
    for file in files:
        for automation in YAML(typ="safe").load(file)["automations"]:
            assert set(automation) <= known(AutomationCore)
            parsed = AutomationCore.model_validate(automation)
            assert parsed.enabled
