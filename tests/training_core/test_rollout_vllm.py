"""The real vLLM engine on the tiny model: contract, weight transfer, and exact resume of a whole training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training_core.config.lora import LoraConfig
from training_core.config.rollout import VllmRolloutConfig
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.models.lora import adapted_layers, attach_lora, merged_parameters
from training_core.models.tiny import build_tiny_checkpoint
from training_core.protocol.digests import weights_digest
from training_core.records import StopReason
from training_core.rl.sampling import Sampler
from training_core.rollout.base import (
    LogprobsKind,
    RolloutRequest,
    SamplingSettings,
    check_rollouts,
    hand_over_weights,
    tensor_digests,
)
from training_core.rollout.build import build_engine
from training_core.rollout.vllm import VllmEngine, receive_weights

pytestmark = pytest.mark.vllm

MAX_NEW_TOKENS = 8
MAX_PROMPT_TOKENS = 160
VLLM = {"engine": "vllm", "dtype": "float32", "max_new_tokens": MAX_NEW_TOKENS, "kv_cache_gib": 0.03125}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[VllmEngine]:
    threads = torch.get_num_threads()
    made = build_engine(VllmRolloutConfig(**VLLM), tiny_checkpoint, max_prompt_tokens=MAX_PROMPT_TOKENS)
    assert isinstance(made, VllmEngine)
    assert torch.get_num_threads() == threads
    yield made
    made.close()
    made.close()


def test_a_transfer_holds_a_few_cast_tensors_and_no_second_model(tiny_checkpoint: Path) -> None:
    """Weights reach vLLM one by one; of those that it has let go, none is kept until the digests are taken."""
    named = list(load_causal_lm(tiny_checkpoint).named_parameters())
    given: list[weakref.ref[torch.Tensor]] = []

    def take(weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, value in weights_iterator:
            given.append(weakref.ref(value))
            del value
            give_up_at = time.monotonic() + 10.0
            # The last one is still the generator's.
            while any(reference() is not None for reference in given[:-1]):
                assert time.monotonic() < give_up_at
                time.sleep(0.001)

    runner = SimpleNamespace(get_model=lambda: torch.nn.Module())
    worker = SimpleNamespace(reload_weights=take, model_runner=runner)
    digests = receive_weights(worker, named, torch.bfloat16)
    assert digests == tensor_digests(named, torch.bfloat16)
    assert len(given) == len(named) > 10


def requests() -> list[RolloutRequest]:
    prompts = [(5, 6, 7), (9, 10, 11, 12, 13), (40,)]
    return [
        RolloutRequest(f"p{i}", sample, prompt, seed=100 * i + sample)
        for i, prompt in enumerate(prompts)
        for sample in range(3)
    ]


def test_new_experts_and_adapters_reach_the_engine(tmp_path: Path) -> None:
    """The engine samples as the model does that was handed over, not with its own first experts.

    It runs before the tests that share an engine: a process holds one at a time.
    """
    first = build_tiny_checkpoint(tmp_path / "a", 1, vocab_size=300, architecture="qwen3_moe")
    policy = load_causal_lm(build_tiny_checkpoint(tmp_path / "b", 2, vocab_size=300, architecture="qwen3_moe"))
    made = build_engine(VllmRolloutConfig(**VLLM), first, max_prompt_tokens=MAX_PROMPT_TOKENS)
    try:
        hand_over_weights(made, merged_parameters(policy), 1)
        assert_samples_like(made, policy)
        attach_lora(policy, LoraConfig(rank=4), 1)
        with torch.no_grad():
            for _, layer in adapted_layers(policy):
                layer.lora_B["default"].weight.fill_(0.05)
        report = hand_over_weights(made, merged_parameters(policy), 2)
        assert report.num_changed_tensors == len(adapted_layers(policy))
        assert_samples_like(made, policy)
    finally:
        made.close()


def assert_samples_like(engine: Any, model: Any) -> None:
    for request, rollout in zip(requests(), engine.generate(requests(), SamplingSettings(MAX_NEW_TOKENS)), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *rollout.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], dim=-1)
        first = len(request.prompt_ids) - 1
        expected = [logprobs[first + t, token].item() for t, token in enumerate(rollout.token_ids)]
        assert rollout.logprobs == pytest.approx(expected, abs=1e-3)


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


def test_nothing_of_a_long_prompt_outlives_the_weights_that_read_it(engine: VllmEngine, tiny_checkpoint: Path) -> None:
    """Fault 33. A cached prefix is of whole blocks, 128 tokens on a CPU: shorter prompts would show nothing."""
    model = load_causal_lm(tiny_checkpoint)
    prompt = tuple(300 + 7 * position % 200 for position in range(MAX_PROMPT_TOKENS))
    request = RolloutRequest("long", 0, prompt, seed=5)
    for version in (20, 21):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.add_(0.3 * (version - 20))
        hand_over_weights(engine, list(model.named_parameters()), version)
        for _ in range(2):
            (rollout,) = engine.generate([request], SamplingSettings(MAX_NEW_TOKENS))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *rollout.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            assert rollout.logprobs == pytest.approx(expected.tolist(), abs=5e-3)


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
    tiny_checkpoint: Path, rl_stage: Any, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    config = rl_stage.config(
        rollout={**VLLM, "dtype": "bfloat16"},
        num_steps=3,
        autocast="bfloat16",
        kl={"placement": "loss", "coefficient": 0.1},
    )
    with pytest.MonkeyPatch.context() as patch:
        original = Sampler.score

        def copying(self: Sampler, requests: Any, rows: Any, rollouts: Any, *others: Any, **named: Any) -> Any:
            if rollouts[0].weight_version == 2:
                shutil.copytree(whole, killed)  # What a SIGKILL here would leave: a checkpoint of step 2.
            return original(self, requests, rows, rollouts, *others, **named)

        patch.setattr(Sampler, "score", copying)
        summary = rl_stage.run(whole, tiny_checkpoint, config)
    assert not (killed / "outputs" / "policy").exists()
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "training_core", str(killed / "spec.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert weights_digest(killed / "outputs" / "policy") == summary["weights_sha256"]
    assert summary["weights_sha256"] != summary["reference_weights_sha256"]
    assert load_tokenizer(killed / "outputs" / "policy").eos_token_id is not None
