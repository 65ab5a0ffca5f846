"""What is refused before anything runs, or before the first training."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_stages.chain import config_of, plan, run, states

from tasks.planning import ChainState
from tasks.plans import PlanState
from tasks.stage_alone import run_stage_alone
from training_core.errors import (
    ArtifactError,
    ConfigurationError,
    DataError,
    DigestMismatchError,
)

FROM_PAIRS = ["algorithm={name: dpo, optimizer: {learning_rate: 1e-5}}", "rewards=[]"]


def test_a_digest_in_the_config_is_held_to(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DigestMismatchError, match=r"data\.preferences\.0\.path"):
        plan(scripted, f"data.preferences.0.sha256={'a' * 64}")


@pytest.mark.parametrize("source", [".models/some.gguf", "owner/some.gguf", "./some-model", "owner/.model"])
def test_what_can_be_no_hub_name_is_not_taken_for_one(scripted, source: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match="paths are relative to the folder where the command runs") as caught:
        plan(scripted, f"checkpoint.source={source}")
    assert "hub:" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("data.preferences.0.path=pars.jsonl", ["data.preferences.0.path", "Did you mean", "pairs.jsonl"]),
        ("checkpoint.source=modle", ["checkpoint.source", "Did you mean"]),
        ("data.eval_prompts=no/where.jsonl", ["data.eval_prompts", "does not exist either"]),
        ("data.preferences.0.path=hf://org/name", ["data set of the Hugging Face hub", "name that"]),
        ("data.preferences.0.path=other.jsonl", ["0.path: other.jsonl does not exist. Looked for", "relative to"]),
        ("data.preferences.0.path=~no-such-user/a.jsonl", ["data.preferences.0.path: ~no-such-user", "home"]),
        (f"data.rl_prompts={'a' * 300}.jsonl", ["data.rl_prompts: aaa", "cannot be read: File name too long"]),
        ("checkpoint.source=owner/some-model", ["write hub:owner/some-model and checkpoint.revision"]),
        ("checkpoint.source=away", ["checkpoint.source: away is a link to gone, and that target is missing"]),
        ("checkpoint.chat_template=away", ["checkpoint.chat_template: away is a link to gone"]),
        # Of a kind that no stage reads.
        ("data.preferences.0.path=model", ["data.preferences.0.path: model is a folder. It holds", "Allowed"]),
        ("data.eval_prompts=rows.xlsx", ["data.eval_prompts: rows.xlsx is of an unknown kind. Allowed", "read_excel"]),
        ("data.preferences.0.path=rows.txt", ["rows.txt is of an unknown kind. Allowed"]),
        ("checkpoint.source=pairs.jsonl", ["pairs.jsonl is neither a folder nor a .gguf file"]),
        ("checkpoint.source=model/model.safetensors", ["Did you mean the folder", "model?"]),
        ("checkpoint.chat_template=model", ["checkpoint.chat_template", "is no file"]),
        ("checkpoint.chat_template=blank.jinja", ["blank.jinja is blank"]),
        ("checkpoint.chat_template=latin.jinja", ["latin.jinja is not UTF-8 text (byte 0)"]),
    ],
)
def test_files_that_no_stage_could_read(scripted, setting: str, wanted: list[str]) -> None:  # type: ignore[no-untyped-def]
    (scripted.path / "away").symlink_to("gone")
    for name, content in (("rows.xlsx", b"a"), ("rows.txt", b"a"), ("blank.jinja", b" "), ("latin.jinja", b"\xe9")):
        (scripted.path / name).write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        plan(scripted, setting)
    assert all(part in str(caught.value) for part in wanted), str(caught.value)


def test_a_name_that_is_not_near_is_not_suggested(scripted) -> None:  # type: ignore[no-untyped-def]
    (scripted.path / "pairs.png").touch()
    for setting in ("data.preferences.0.path=prompts.jsonl", "checkpoint.source=pairs", "data.rl_prompts=model"):
        with pytest.raises(ConfigurationError) as caught:
            plan(scripted, setting)
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "error", "wanted"),
    [
        ("pairs.jsonl", b"", DataError, "data.preferences.0.path: pairs.jsonl holds no rows"),
        ("model/model.safetensors", b"", ArtifactError, "model.safetensors is not a whole safetensors file"),
        ("model/model.safetensors", None, ArtifactError, "has no model.safetensors"),
        ("model/old.bin", b"", ArtifactError, "holds pickled files, which can run any code when loaded: old.bin"),
        ("model/config.json", None, ArtifactError, "config.json is missing"),
    ],
)
def test_what_a_stage_would_refuse_at_once_is_refused_before(
    scripted,
    name: str,
    content: bytes | None,
    error: type[Exception],
    wanted: str,  # type: ignore[no-untyped-def]
) -> None:
    if content is None:
        (scripted.path / name).unlink()
    else:
        (scripted.path / name).write_bytes(content)
    for attempt in (plan, run):
        with pytest.raises(error) as caught:
            attempt(scripted)
        assert wanted in str(caught.value)
    assert not scripted.root.exists()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["reward_model=null"], "rewards.0 is of kind reward_model, but there is no `reward_model` section"),
        (
            ["reward_model=null", "rewards=[{kind: sentiment}]", "evaluation.reward_model=true"],
            "evaluation.reward_model",
        ),
        (["gate.primary.metric=sentimnt"], "Did you mean 'sentiment'?"),
        (["gate.guards=[{kind: maximum, metric: toxicity, maximum: 1}]"], "gate.guards.0.metric is 'toxicity'"),
        (["rewards=[{kind: soft_overlong, buffer_tokens: 64}]"], "rollout.max_new_tokens = 32"),
        (["rewards=[{kind: length, min_tokens: 40, max_tokens: 50}]"], "no answer could have the full reward"),
        (
            ["evaluation.metrics=[{kind: sentiment}, {kind: soft_overlong, buffer_tokens: 33}]"],
            "evaluation.metrics.1.buffer_tokens is 33, longer than a whole answer",
        ),
        (
            [
                "evaluation.sampling.max_new_tokens=16",
                "evaluation.metrics=[{kind: sentiment}, {kind: soft_overlong, buffer_tokens: 17}]",
            ],
            "evaluation.sampling.max_new_tokens = 16",
        ),
        (["data.max_prompt_tokens=2048"], "data.max_total_tokens = 1024"),
        (["evaluation.num_prompts=10"], "gate.min_prompts = 200"),
        ([f"checkpoint={{source: 'hub:a/b', revision: {'a' * 40!r}}}"], "launch.offline: false"),
        (["rewards=[{kind: sentiment}, {kind: sentiment}]"], "give each a `name`"),
        (["rewards=[]"], "rewards"),
        (["registry.task=text-generation"], "registry.task"),  # Models are registered for chat; nothing to choose.
        (["name=My Run"], "name"),
    ],
)
def test_sections_that_do_not_fit(scripted, settings: list[str], wanted: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError) as caught:
        config_of(scripted, *settings)
    assert wanted in str(caught.value), str(caught.value)


def test_conflicts_are_problems_of_their_own_where_they_were_written(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError) as caught:
        config_of(scripted, "data.max_prompt_tokens=2048", "evaluation.num_prompts=10", "gate.primary.metric=x")
    head, *lines = str(caught.value).splitlines()
    assert head == "the configuration has 3 problems:"
    fields = ["data.max_prompt_tokens", "gate.primary.metric", "evaluation.num_prompts"]
    assert [line.split(":")[0].strip() for line in lines] == [f"--set {field}" for field in fields]


def test_an_answer_longer_than_the_model_reads(scripted) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=r"at most 4096 tokens.*Write at most 3584"):
        run(scripted, "rollout.max_new_tokens=5000")
    with pytest.raises(ConfigurationError, match=r"evaluation\.sampling\.max_new_tokens is 4090, .*at most 4096"):
        run(scripted, "evaluation.sampling.max_new_tokens=4090")
    assert not (scripted.root / "stages" / "check_data").exists()


@pytest.mark.parametrize(
    ("summary", "settings", "wanted"),
    [
        ({"longest_rl_prompt_tokens": 4065}, [], "longest RL prompt has 4065 tokens and rollout.max_new_tokens is 32"),
        ({"longest_eval_prompt_tokens": 4065}, [], "longest held-out prompt has 4065 tokens and rollout.max_new"),
        (
            {"longest_rl_prompt_tokens": 4064, "longest_eval_prompt_tokens": 4064},
            ["evaluation.sampling.max_new_tokens=33"],
            "evaluation.sampling.max_new_tokens is 33, together more than the 4096",
        ),
        ({"longest_rl_prompt_tokens": 4064, "longest_eval_prompt_tokens": 4064}, [], None),
        ({"longest_rl_prompt_tokens": None, "longest_eval_prompt_tokens": None}, [], None),
        ({"longest_eval_prompt_tokens": 4065}, ["evaluation.num_prompts=200"], None),
        # What is not sampled in training needs no room there.
        ({"longest_rl_prompt_tokens": 4065}, FROM_PAIRS, None),
        ({}, [*FROM_PAIRS, "rollout.max_new_tokens=5000", "evaluation.sampling.max_new_tokens=32"], None),
    ],
)
def test_prompts_that_leave_no_room_for_an_answer_are_found_before_training(
    scripted,
    summary: dict[str, Any],
    settings: list[str],
    wanted: str | None,  # type: ignore[no-untyped-def]
) -> None:
    scripted.script({"check_data": {"summary": summary}})
    if wanted is None:
        assert set(states(run(scripted, *settings)).values()) == {"Completed"}
        return
    with pytest.raises(ConfigurationError) as caught:
        run(scripted, *settings)
    assert wanted in str(caught.value)
    assert not (scripted.root / "stages" / "reward_model").exists()


def test_a_root_that_a_deployment_left_unfilled(scripted) -> None:  # type: ignore[no-untyped-def]
    config = config_of(scripted).model_copy(update={"root": "{{ $TIDEGATE_ROOT }}"})
    for begin in (ChainState.begin, lambda config: run_stage_alone("gate", config, "run")):
        with pytest.raises(ConfigurationError, match=r"TIDEGATE_ROOT.*deploy again"):
            begin(config)
    assert not list(scripted.path.glob("{{*"))


def test_too_few_held_out_prompts_are_found_before_training(scripted) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"check_data": {"summary": {"num_eval_prompts": 199}}})
    with pytest.raises(ConfigurationError, match=r"give 199 held-out prompts, but gate\.min_prompts is 200"):
        run(scripted)
    assert not list((scripted.root / "stages").glob("reward_model/*"))
    with pytest.raises(ConfigurationError, match="199 held-out prompts"):
        plan(scripted, "reward_model=null", "rewards=[{kind: sentiment}]")
    assert plan(scripted, "gate.min_prompts=199")["reward_model"].state is PlanState.RUNS


def test_too_few_groups_of_held_out_prompts_are_found_before_training(scripted) -> None:  # type: ignore[no-untyped-def]
    scripted.script({"check_data": {"summary": {"num_eval_prompts": 200, "num_eval_groups": 29}}})
    with pytest.raises(ConfigurationError, match=r"come in 29 groups.*gate\.min_clusters is 30"):
        run(scripted)
    assert not list((scripted.root / "stages").glob("reward_model/*"))
    assert plan(scripted, "gate.min_clusters=29")["reward_model"].state is PlanState.RUNS
