"""Rollout engines: the contract, seeds, temperatures, and refusals of weights that are not the trainer's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.config.rollout import TransformersRolloutConfig, VllmRolloutConfig
from training_core.errors import ConfigurationError, DataError, WeightVersionError
from training_core.models.loading import load_causal_lm
from training_core.protocol.digests import weights_digest
from training_core.records import StopReason
from training_core.rollout.base import (
    LogprobsKind,
    RolloutRequest,
    SamplingSettings,
    WeightReport,
    check_report,
    check_rollouts,
    hand_over_weights,
)
from training_core.rollout.batch import build_batch, build_micro_batch, by_size, chunks
from training_core.rollout.build import build_engine, read_eos_token_ids
from training_core.rollout.scripted import ScriptedEngine
from training_core.rollout.transformers import TransformersEngine, draw_tokens, keep_top_p
from training_core.rollout.vllm import VllmEngine

PROMPTS = [(5, 6, 7), (9, 10, 11, 12, 13), (40,)]


def requests(num_samples: int = 2) -> list[RolloutRequest]:
    return [
        RolloutRequest(f"p{i}", sample, prompt, seed=100 * i + sample)
        for i, prompt in enumerate(PROMPTS)
        for sample in range(num_samples)
    ]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[TransformersEngine]:
    config = TransformersRolloutConfig(engine="transformers", dtype="float32", max_new_tokens=6)
    made = build_engine(config, tiny_checkpoint, max_prompt_tokens=5)
    assert isinstance(made, TransformersEngine)
    yield made
    made.close()
    made.close()


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> PreTrainedModel:
    return load_causal_lm(tiny_checkpoint)


def test_logprobs_are_those_of_the_sampled_distribution(engine: TransformersEngine, model: PreTrainedModel) -> None:
    for temperature in (1.0, 0.5):
        for rollout, request in zip(
            engine.generate(requests(), SamplingSettings(6, temperature)), requests(), strict=True
        ):
            ids = torch.tensor([[*request.prompt_ids, *rollout.token_ids]])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, dim=-1)
            positions = range(len(request.prompt_ids) - 1, ids.shape[1] - 1)
            expected = [logprobs[t, ids[0, t + 1]].item() for t in positions]
            assert rollout.logprobs == pytest.approx(expected, abs=1e-4)
            assert rollout.logprobs_kind == LogprobsKind.SAMPLED


def test_an_answer_depends_on_its_seed_and_not_on_its_neighbours(engine: TransformersEngine) -> None:
    settings = SamplingSettings(6)
    together = engine.generate(requests(), settings)
    backwards = engine.generate(requests()[::-1], settings)[::-1]
    alone = [engine.generate([request], settings)[0] for request in requests()]
    assert [r.token_ids for r in together] == [r.token_ids for r in backwards] == [r.token_ids for r in alone]
    reseeded = engine.generate([replace(request, seed=request.seed + 1) for request in requests()], settings)
    assert [r.token_ids for r in reseeded] != [r.token_ids for r in together]
    assert together[0].token_ids != together[1].token_ids


def test_an_answer_ends_at_any_of_the_eos_tokens(tiny_checkpoint: Path, engine: TransformersEngine) -> None:
    plain = engine.generate(requests(), SamplingSettings(6))
    stop = {rollout.token_ids[2] for rollout in plain}
    config = TransformersRolloutConfig(engine="transformers", dtype="float32", max_new_tokens=6)
    stopping = TransformersEngine(
        config, tiny_checkpoint, max_prompt_tokens=5, max_new_tokens=6, eos_token_ids=sorted(stop)
    )
    for before, after in zip(plain, stopping.generate(requests(), SamplingSettings(6)), strict=True):
        end = next(i for i, token in enumerate(before.token_ids) if token in stop)
        assert after.token_ids == before.token_ids[: end + 1]
        assert after.stop_reason == StopReason.EOS
        assert len(after.logprobs) == end + 1


def test_the_token_limit_is_a_stop_reason(engine: TransformersEngine) -> None:
    (rollout,) = engine.generate(requests()[:1], SamplingSettings(1))
    assert len(rollout.token_ids) == 1
    assert rollout.stop_reason == StopReason.LENGTH


def test_greedy_takes_the_most_probable_token(engine: TransformersEngine, model: PreTrainedModel) -> None:
    (rollout,) = engine.generate(requests()[:1], SamplingSettings(3, temperature=0.0))
    ids = list(PROMPTS[0])
    for token in rollout.token_ids:
        with torch.no_grad():
            assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_drawing_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.3])
    uniforms = torch.arange(1000, dtype=torch.float64) / 1000
    logits = probabilities.log().expand(1000, 3)
    tokens, logprobs = draw_tokens(logits, uniforms, SamplingSettings(1))
    assert torch.bincount(tokens).tolist() == pytest.approx([500, 200, 300], abs=1)
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])
    tokens, logprobs = draw_tokens(logits, uniforms, SamplingSettings(1, top_p=0.7))
    assert torch.bincount(tokens, minlength=3).tolist() == pytest.approx([625, 0, 375], abs=1)
    torch.testing.assert_close(logprobs[0], torch.tensor(0.625).log())


def test_the_largest_draw_takes_a_possible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -float("inf")]])
    tokens, _ = draw_tokens(logits, torch.tensor([1 - 2**-53], dtype=torch.float64), SamplingSettings(1))
    assert tokens.tolist() == [1]


def test_top_p_keeps_at_least_one_token() -> None:
    kept: Tensor = keep_top_p(torch.tensor([[0.4, 0.6]]).log(), 1e-6)
    assert kept.exp().tolist() == [[0.0, 1.0]]


def named(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def test_until_the_first_load_an_engine_holds_the_checkpoint_it_was_built_from(tiny_checkpoint: Path) -> None:
    config = TransformersRolloutConfig(engine="transformers", dtype="float32", max_new_tokens=6)
    fresh = build_engine(config, tiny_checkpoint, max_prompt_tokens=5)
    assert fresh.reported_weights() is None
    with pytest.raises(WeightVersionError, match="holds the checkpoint it was built from"):
        check_report(fresh.reported_weights(), 0, "0" * 64)
    rollouts = fresh.generate(requests(), SamplingSettings(2))
    check_rollouts(rollouts, requests(), 0, weights_digest(tiny_checkpoint))
    report = hand_over_weights(fresh, named(load_causal_lm(tiny_checkpoint)), version=7)
    assert fresh.reported_weights() == report
    check_rollouts(fresh.generate(requests(), SamplingSettings(2)), requests(), 7, report.sha256)


def test_a_digest_is_of_names_shapes_and_values_in_the_engines_dtype() -> None:
    """Pinned: a checkpoint's metrics and an evaluation's settings name weights by such digests."""
    tensors = [("b", torch.tensor([[1.0, 1.0 + 2**-12]])), ("a", torch.zeros(2))]
    engine = ScriptedEngine(lambda request: ([1], [-0.5]), [1])
    engine._dtype = torch.bfloat16
    rounded = [("a", torch.zeros(2)), ("b", torch.ones(1, 2))]
    assert engine.weights_digest_of(tensors) == engine.weights_digest_of(rounded)
    lines = ""
    for name, shape, values in (("a", "(2,)", b"\0\0" * 2), ("b", "(1, 2)", b"\x80\x3f" * 2)):
        header = "\0".join((name, "torch.bfloat16", shape, "")).encode()
        lines += f"{name}\0{sha256(header + values).hexdigest()}\n"
    assert engine.load_weights(tensors, 3).sha256 == sha256(lines.encode()).hexdigest()


def test_weights_are_handed_over_and_reported(tiny_checkpoint: Path, engine: TransformersEngine) -> None:
    trained = load_causal_lm(tiny_checkpoint)
    first = hand_over_weights(engine, named(trained), version=0)
    assert (first.version, first.num_changed_tensors) == (0, first.num_tensors)
    before = engine.generate(requests(), SamplingSettings(4))
    again = hand_over_weights(engine, named(trained), version=1)
    assert again.num_changed_tensors == 0
    assert again.sha256 == first.sha256
    with torch.no_grad():
        trained.model.layers[0].mlp.up_proj.weight.add_(0.5)
    changed = hand_over_weights(engine, named(trained), version=2)
    assert changed.num_changed_tensors == 1
    assert changed.sha256 != first.sha256
    after = engine.generate(requests(), SamplingSettings(4))
    check_rollouts(after, requests(), 2, changed.sha256)
    assert [r.logprobs for r in after] != [r.logprobs for r in before]
    with pytest.raises(WeightVersionError, match="weight version 2"):
        check_rollouts(after, requests(), 3, changed.sha256)
    with pytest.raises(WeightVersionError, match="trainer expects"):
        check_rollouts(after, requests(), 2, first.sha256)
    hand_over_weights(engine, named(load_causal_lm(tiny_checkpoint)), version=3)


@pytest.mark.parametrize(
    "misreport",
    [
        lambda report: replace(report, version=report.version - 1),
        lambda report: replace(report, sha256="0" * 64),
        lambda report: replace(report, num_tensors=report.num_tensors - 1),
        lambda report: replace(report, num_changed_tensors=0),
    ],
    ids=["stale version", "other digest", "tensor lost", "nothing changed"],
)
def test_an_engine_with_other_weights_is_refused(misreport: object) -> None:
    lying = False

    def report(honest: WeightReport) -> WeightReport:
        return misreport(honest) if lying else honest  # type: ignore[operator]

    engine = ScriptedEngine(lambda request: ([1], [-0.5]), [1], misreport=report)
    hand_over_weights(engine, [("w", torch.ones(2))], version=4)
    lying = True
    with pytest.raises(WeightVersionError):
        hand_over_weights(engine, [("w", torch.zeros(2))], version=5)


def test_answers_to_other_requests_are_refused() -> None:
    engine = ScriptedEngine(lambda request: ([1], [-0.5]), [1])
    report = hand_over_weights(engine, [("w", torch.ones(2))], version=0)
    rollouts = engine.generate(requests(), SamplingSettings(4))
    check_rollouts(rollouts, requests(), 0, report.sha256)
    with pytest.raises(RuntimeError, match="other answers"):
        check_rollouts(rollouts[::-1], requests(), 0, report.sha256)
    with pytest.raises(RuntimeError, match="raw model"):
        check_rollouts([replace(r, logprobs_kind=LogprobsKind.RAW) for r in rollouts], requests(), 0, report.sha256)


def test_a_poll_that_raises_ends_sampling(engine: TransformersEngine) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests(), SamplingSettings(6), poll=stop)


def test_prompts_that_leave_no_room_are_refused(tiny_checkpoint: Path) -> None:
    config = TransformersRolloutConfig(engine="transformers", max_new_tokens=100)
    with pytest.raises(DataError, match=r"Lower rollout\.max_new_tokens to 12"):
        build_engine(config, tiny_checkpoint, max_prompt_tokens=500)


def test_eos_tokens_come_from_generation_config_and_tokenizer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import json
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [0, 5]}))
    own = read_eos_token_ids(tiny_checkpoint)
    assert read_eos_token_ids(directory) == sorted({0, 5, *own})


def test_micro_batches_hold_each_answer_once_and_predict_its_tokens() -> None:
    engine = ScriptedEngine(
        lambda request: ([20 + request.sample_index] * (request.sample_index + 1), [-1.0] * 3), [20]
    )
    asked = requests(3)
    rollouts = engine.generate(asked, SamplingSettings(9))
    batch = build_batch(
        [request.prompt_ids for request in asked],
        [rollout.token_ids for rollout in rollouts],
        [rollout.logprobs[: len(rollout.token_ids)] for rollout in rollouts],
    )
    seen = []
    for rows in chunks(by_size(batch, range(len(asked))), batch.total_length, 4, None):
        micro = build_micro_batch(batch, rows, 0, torch.device("cpu"))
        seen += micro.rows.tolist()
        rebuilt = micro.scatter(micro.targets.float())
        for index, row in enumerate(micro.rows.tolist()):
            length = len(batch.answers[row])
            assert rebuilt[index, :length].tolist() == list(batch.answers[row])
            assert rebuilt[index, length:].abs().sum() == 0
        inputs = micro.input_ids[micro.predict_rows, micro.predict_positions + 1]
        torch.testing.assert_close(inputs, micro.targets)
    assert sorted(seen) == list(range(len(asked)))


def test_a_sliding_window_does_not_count_padding_as_distance(
    tiny_decoder: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = tiny_decoder("mistral", sliding_window=4)
    model.save_pretrained(tmp_path)
    config = TransformersRolloutConfig(engine="transformers", dtype="float32", max_new_tokens=6)
    made = TransformersEngine(config, tmp_path, max_prompt_tokens=12, max_new_tokens=6, eos_token_ids=[2])
    asked = [RolloutRequest("long", 0, tuple(range(5, 17)), 1), RolloutRequest("short", 0, (7, 8), 2)]
    for request, rollout in zip(asked, made.generate(asked, SamplingSettings(6)), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *rollout.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
        positions = range(len(request.prompt_ids) - 1, ids.shape[1] - 1)
        assert rollout.logprobs == pytest.approx([logprobs[t, ids[0, t + 1]].item() for t in positions], abs=1e-4)


@pytest.mark.parametrize(
    ("model_type", "changes"), [("lfm2", {"layer_types": ["conv", "full_attention"]}), ("recurrent_gemma", {})]
)
def test_layers_that_carry_a_state_are_refused_when_the_engine_is_built(
    tiny_decoder: Callable[..., PreTrainedModel], tmp_path: Path, model_type: str, changes: dict[str, list[str]]
) -> None:
    tiny_decoder(model_type, **changes).save_pretrained(tmp_path)
    config = TransformersRolloutConfig(engine="transformers", max_new_tokens=6)
    with pytest.raises(ConfigurationError, match=r"carry a state .* rollout\.engine: vllm"):
        TransformersEngine(config, tmp_path, max_prompt_tokens=5, max_new_tokens=6, eos_token_ids=[2])


def test_the_engine_samples_on_the_device_that_training_runs_on(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training_core.rollout.transformers.training_device", lambda: torch.device("meta"))
    config = TransformersRolloutConfig(engine="transformers", max_new_tokens=6)
    made = build_engine(config, tiny_checkpoint, max_prompt_tokens=5)
    assert isinstance(made, TransformersEngine)
    assert {parameter.device.type for parameter in made.model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("a fault within the engine"), RuntimeError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ConfigurationError),
        (torch.OutOfMemoryError("out of memory"), ConfigurationError),
        (ValueError("the cache is too small for one answer"), ConfigurationError),
        (NotImplementedError("no such attention"), ConfigurationError),
    ],
    ids=lambda value: str(value)[:12],
)
def test_only_what_a_setting_can_mend_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def refuse(**settings: object) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuse))
    config = VllmRolloutConfig(engine="vllm", max_new_tokens=4)
    with pytest.raises(raised) as caught:
        VllmEngine(config, tmp_path, max_prompt_tokens=4, max_new_tokens=4, eos_token_ids=[0])
    assert type(caught.value) is raised
