"""The real vLLM engine on the tiny model: contract, weight transfer, and exact resume of a whole training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from training_core.config.rollout import VllmRolloutConfig
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.protocol.digests import weights_digest
from training_core.records import StopReason
from training_core.rollout.base import LogprobsKind, RolloutRequest, SamplingSettings, check_rollouts, hand_over_weights
from training_core.rollout.build import build_engine
from training_core.rollout.vllm import VllmEngine
from training_core.stages.grpo_step import GrpoTrainer

pytestmark = pytest.mark.vllm

MAX_NEW_TOKENS = 8
MAX_PROMPT_TOKENS = 40
VLLM = {"engine": "vllm", "dtype": "float32", "max_new_tokens": MAX_NEW_TOKENS, "kv_cache_gib": 0.03125}


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[VllmEngine]:
    threads = torch.get_num_threads()
    made = build_engine(VllmRolloutConfig(**VLLM), tiny_checkpoint, max_prompt_tokens=MAX_PROMPT_TOKENS)
    assert isinstance(made, VllmEngine)
    assert torch.get_num_threads() == threads
    yield made
    made.close()
    made.close()


def requests() -> list[RolloutRequest]:
    prompts = [(5, 6, 7), (9, 10, 11, 12, 13), (40,)]
    return [
        RolloutRequest(f"p{i}", sample, prompt, seed=100 * i + sample)
        for i, prompt in enumerate(prompts)
        for sample in range(3)
    ]


def test_contract_and_weight_transfer(engine: VllmEngine, tiny_checkpoint: Path) -> None:
    model = load_causal_lm(tiny_checkpoint)
    named = list(model.named_parameters())
    for version, temperature in enumerate((1.0, 0.5)):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.add_(0.3 * version)
        report = hand_over_weights(engine, named, version)
        assert report.num_tensors == len(named)
        assert report.num_changed_tensors == (len(named) if version == 0 else 1)
        rollouts = engine.generate(requests(), SamplingSettings(MAX_NEW_TOKENS, temperature))
        check_rollouts(rollouts, requests(), version, report.sha256)
        assert rollouts == engine.generate(requests(), SamplingSettings(MAX_NEW_TOKENS, temperature))
        for rollout, request in zip(rollouts, requests(), strict=True):
            ids = torch.tensor([[*request.prompt_ids, *rollout.token_ids]])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, dim=-1)
            first = len(request.prompt_ids) - 1
            expected = [logprobs[first + t, token].item() for t, token in enumerate(rollout.token_ids)]
            assert rollout.logprobs == pytest.approx(expected, abs=5e-3)
            assert rollout.logprobs_kind == LogprobsKind.SAMPLED
    assert len({rollout.token_ids for rollout in rollouts}) > 6


def test_answers_end_at_the_given_tokens(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.generate(requests(), SamplingSettings(MAX_NEW_TOKENS))
    stop = sorted({rollout.token_ids[2] for rollout in plain})
    monkeypatch.setattr(engine, "_eos_token_ids", stop)
    for before, after in zip(plain, engine.generate(requests(), SamplingSettings(MAX_NEW_TOKENS)), strict=True):
        end = next(i for i, token in enumerate(before.token_ids) if token in stop)
        assert after.token_ids == before.token_ids[: end + 1]
        assert after.stop_reason == StopReason.EOS
    assert any(rollout.stop_reason == StopReason.LENGTH for rollout in plain)


def test_greedy_and_top_p(engine: VllmEngine, tiny_checkpoint: Path) -> None:
    hand_over_weights(engine, list(load_causal_lm(tiny_checkpoint).named_parameters()), version=9)
    greedy = engine.generate(requests(), SamplingSettings(4, temperature=0.0))
    nearly = engine.generate(requests(), SamplingSettings(4, temperature=1.0, top_p=1e-6))
    assert [r.token_ids for r in greedy] == [r.token_ids for r in nearly]
    assert greedy[0].token_ids == greedy[1].token_ids
    assert nearly[0].logprobs == pytest.approx([0.0] * 4, abs=1e-5)


@pytest.mark.slow
def test_killed_and_continued_in_another_process_equals_never_killed(
    tiny_checkpoint: Path, grpo_stage: Any, tmp_path: Path
) -> None:
    config = grpo_stage.config(
        rollout={**VLLM, "dtype": "bfloat16"},
        num_steps=4,
        autocast="bfloat16",
        kl={"placement": "loss", "coefficient": 0.1},
    )
    with pytest.MonkeyPatch.context() as patch:
        original = GrpoTrainer.score

        def killing(self: GrpoTrainer, rows: Any, rollouts: Any) -> Any:
            if rollouts[0].weight_version == 3:
                raise Killed
            return original(self, rows, rollouts)

        patch.setattr(GrpoTrainer, "score", killing)
        with pytest.raises(Killed):
            grpo_stage.run(tmp_path / "killed", tiny_checkpoint, config)
    whole = grpo_stage.run(tmp_path / "whole", tiny_checkpoint, config)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "training_core", str(tmp_path / "killed" / "spec.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert weights_digest(tmp_path / "killed" / "outputs" / "policy") == whole["weights_sha256"]
    assert whole["weights_sha256"] != whole["reference_weights_sha256"]
    assert load_tokenizer(tmp_path / "killed" / "outputs" / "policy").eos_token_id is not None
