"""`name: custom`: the README's own algorithm as it is printed there, and what a wrong one is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from training_core.config.advantages import CustomAdvantage
from training_core.config.policy_losses import CustomLoss
from training_core.errors import ConfigurationError, EvaluationError
from training_core.metrics import read_metrics

README = Path(__file__).resolve().parents[2] / "README.md"
TITLE = "Your own algorithm in 20 lines"
WRONG = """
import torch

one = 1


def too_many(inputs):
    return torch.zeros(len(inputs.scores) + 1)


def infinite(inputs, value):
    return torch.full(inputs.mask.shape, float(value)).where(inputs.mask, torch.nan)


def by_token(inputs):
    return torch.arange(inputs.mask.numel()).reshape(inputs.mask.shape)


def by_row(logprobs, old_logprobs, advantages, mask):
    return (-advantages * logprobs).sum(1)


def broken(logprobs, old_logprobs, advantages, mask):
    return torch.where(mask, logprobs * torch.nan, 0.0)


def all_clipped(logprobs, old_logprobs, advantages, mask):
    return -advantages * logprobs, torch.ones_like(mask)
"""


def blocks() -> tuple[str, str]:
    """Return the module and the config that the README prints."""
    text = README.read_text(encoding="utf-8").partition(f"## {TITLE}\n")[2].partition("\n## ")[0]
    found = dict(re.findall(r"```(python|yaml)\n(.*?)```", text, flags=re.DOTALL))
    return found["python"], found["yaml"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of wrong functions."""
    name = f"wrong_parts_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(WRONG, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_readme_keeps_its_word() -> None:
    module, config = blocks()
    assert len((module + config).splitlines()) <= 20


def test_the_readmes_algorithm_trains(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, text = blocks()
    (tmp_path / "my_parts.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = YAML(typ="safe").load(text)["algorithm"]
    config = rl_stage.config()
    # As printed, but for fewer and smaller steps.
    config["algorithm"] = {**algorithm, "num_steps": 2, "prompts_per_step": 2, "autocast": "none"}
    summary = rl_stage.run(tmp_path / "stage", tiny_checkpoint, config)
    assert summary["weights_sha256"] != summary["reference_weights_sha256"]
    rows = read_metrics(tmp_path / "stage" / "metrics.jsonl")
    assert [row["train/num_updates"] for row in rows] == [1, 1]


def test_the_readmes_functions_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from training_core.ops.advantages import EstimatorInputs
    from training_core.rl.plugs import build_estimator, build_policy_loss

    (tmp_path / "my_parts.py").write_text(blocks()[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_parts", raising=False)
    mask = torch.tensor([[True, False], [True, True], [True, True], [True, True], [True, True]])
    inputs = EstimatorInputs(
        scores=torch.tensor([1.0, 2.0, 6.0, torch.nan, torch.nan], dtype=torch.float64),
        present=torch.tensor([True, True, True, False, False]),
        group_ids=torch.tensor([0, 0, 0, 0, 1]),
        mask=mask,
        kl_penalties=None,
    )
    found = build_estimator(CustomAdvantage(kind="custom", import_path="my_parts:against_median"))(inputs)
    assert found.advantages.tolist() == [[-1.0, 0.0], [0.0, 0.0], [4.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    assert (found.num_groups, found.num_singletons, found.num_without_score) == (1, 0, 2)
    loss = build_policy_loss(CustomLoss(kind="custom", import_path="my_parts:near_old", parameters={"price": 2.0}))
    logprobs = torch.tensor([[0.5, torch.nan]], dtype=torch.float64, requires_grad=True)
    losses, is_clipped = loss(logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[True, False]]))
    assert losses[0].tolist() == pytest.approx([-(2.718281828459045**0.5) + 0.5, 0.0])
    assert not is_clipped.any()
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-(2.718281828459045**0.5) + 2.0, 0.0])


def run(rl_stage: Any, path: Path, checkpoint: Path, **parts: Any) -> dict[str, Any]:
    plain = {"advantage": {"kind": "group_centred"}, "loss": {"kind": "reinforce"}}
    config = rl_stage.config(name="custom", num_steps=1, **{**plain, **parts})
    return rl_stage.run(path, checkpoint, config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("part", "name", "parameters", "error", "match"),
    [
        (
            "advantage",
            "too_many",
            {},
            EvaluationError,
            r"too_many returned shape \(9,\); it must be one value an answer",
        ),
        ("advantage", "infinite", {"value": "inf"}, EvaluationError, "infinite returned a value that is not finite"),
        ("advantage", "infinite", {"value": "nan"}, EvaluationError, "infinite returned a value that is not finite"),
        ("advantage", "missing", {}, ConfigurationError, "algorithm.advantage: import_path .* cannot be imported"),
        ("advantage", "one", {}, ConfigurationError, "names a int, not a function"),
        ("loss", "by_row", {}, EvaluationError, r"by_row returned shape \(\d+,\); it must be one value a token"),
        ("loss", "broken", {}, EvaluationError, "broken returned a value that is not finite"),
        ("loss", "broken", {"prise": 1.0}, ConfigurationError, "parameters has prise, which .* does not take"),
        ("loss", "missing", {}, ConfigurationError, "algorithm.loss: import_path .* cannot be imported"),
    ],
)
def test_a_wrong_part_is_named(
    tiny_checkpoint: Path,
    rl_stage: Any,
    tmp_path: Path,
    module: str,
    part: str,
    name: str,
    parameters: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    custom = {part: {"kind": "custom", "import_path": f"{module}:{name}", "parameters": parameters}}
    with pytest.raises(error, match=match):
        run(rl_stage, tmp_path / "stage", tiny_checkpoint, **custom)


def test_a_module_that_cannot_be_imported_is_named(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfinished_parts.py").write_text("def estimate(inputs:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    custom = {"kind": "custom", "import_path": "unfinished_parts:estimate"}
    with pytest.raises(ConfigurationError, match=r"'unfinished_parts:estimate' cannot be imported: SyntaxError"):
        run(rl_stage, tmp_path / "stage", tiny_checkpoint, advantage=custom)


def test_finite_values_by_token_pass_with_nan_beside_the_mask(
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path, module: str
) -> None:
    one = {"kind": "custom", "import_path": f"{module}:infinite", "parameters": {"value": "1"}}
    run(rl_stage, tmp_path / "a", tiny_checkpoint, advantage=one)
    tokens = {"kind": "custom", "import_path": f"{module}:by_token"}
    clipped = {"kind": "custom", "import_path": f"{module}:all_clipped"}
    run(rl_stage, tmp_path / "b", tiny_checkpoint, advantage=tokens, loss=clipped)
    assert read_metrics(tmp_path / "a" / "metrics.jsonl")[0]["policy/clip_fraction"] == 0.0
    assert read_metrics(tmp_path / "b" / "metrics.jsonl")[0]["policy/clip_fraction"] == 1.0
