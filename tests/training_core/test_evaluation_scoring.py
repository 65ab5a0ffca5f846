"""Scores of an evaluation that need a model: the reward model's are those of RL, and a full context is no accident."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaModel

from training_core.config.rewards import RewardModelReward
from training_core.evaluation.generation import ModelSource
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples, Sample, add_scores
from training_core.evaluation.scoring import RewardScorer, kl_to_reference
from training_core.evaluation.summary import summarise_model
from training_core.models.chat import decode_answer, encode_prompt
from training_core.models.heads import load_reward_model, new_reward_model, save_reward_model, score_token_ids
from training_core.models.loading import load_tokenizer
from training_core.models.tiny import build_tiny_checkpoint
from training_core.records import Message, PromptRow, StopReason
from training_core.rewards.base import RewardContext
from training_core.rewards.model import load_reward_part

NUM_POSITIONS = 512
ROWS = [
    PromptRow(prompt_id=f"p{i}", prompt=[Message(role="user", content=f"Here is a question for you: {text}")], extra={})
    for i, text in enumerate(["Hello?", "What is there to say about a cold river?"])
]
PROMPTS = [EvaluationPrompt(row.prompt_id, row.prompt_id, row.prompt[0].content) for row in ROWS]


@pytest.fixture(scope="module")
def reward_folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring") / "rm"
    reward = new_reward_model(tiny_checkpoint, seed=1)
    reward.score_mean, reward.score_std = 0.1, 0.5
    save_reward_model(reward, tiny_checkpoint, folder, {})
    return folder


@pytest.fixture(scope="module")
def reward_folder_bfloat16(
    tiny_checkpoint: Path, reward_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("scoring") / "rm_bfloat16"
    save_reward_model(load_reward_model(reward_folder), tiny_checkpoint, folder, {}, torch.bfloat16)
    return folder


def scorer_of(folder: Path) -> RewardScorer:
    return RewardScorer(folder, 4096)


def with_positions(folder: Path, target: Path, num_positions: int) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_positions}))
    return target


def prompt_ids_of(checkpoint: Path) -> list[list[int]]:
    return [encode_prompt(load_tokenizer(checkpoint), row.prompt) for row in ROWS]


def answers(checkpoint: Path) -> ModelSamples:
    """Two answers a prompt: one that ended, one cut by the end of the context. Their ids are no tokenizer's choice."""
    tokenizer = load_tokenizer(checkpoint)
    samples = []
    for index, prompt in enumerate(prompt_ids_of(checkpoint)):
        full = tuple(300 + i % 7 for i in range(NUM_POSITIONS - len(prompt)))
        ended = (301, 302, 303, tokenizer.eos_token_id)
        for number, (ids, reason) in enumerate(((ended, StopReason.EOS), (full, StopReason.LENGTH))):
            samples.append(Sample(index, number, ids, decode_answer(tokenizer, ids), reason))
    return ModelSamples(samples)


@pytest.mark.parametrize("folder", ["reward_folder", "reward_folder_bfloat16"])
def test_evaluation_scores_with_the_function_of_training(
    tiny_checkpoint: Path, folder: str, request: pytest.FixtureRequest
) -> None:
    """To the last bit, for answers that ended and for answers that fill the context exactly."""
    reward_folder = request.getfixturevalue(folder)
    table = answers(tiny_checkpoint)
    source = ModelSource.of("candidate", tiny_checkpoint)
    found = scorer_of(reward_folder).score(source, table, ROWS, PROMPTS)
    sequences = [[*prompt_ids_of(tiny_checkpoint)[s.prompt_index], *s.token_ids] for s in table.samples]
    assert {len(ids) for ids in sequences[1::2]} == {NUM_POSITIONS}
    model, eos = load_reward_model(reward_folder), load_tokenizer(tiny_checkpoint).eos_token_id
    assert found == [model.normalise(s) for s in score_token_ids(model, [[*ids[:-1], eos] for ids in sequences], 0)]
    config = RewardModelReward(kind="reward_model")
    part = load_reward_part(config, reward_folder, tiny_checkpoint, torch.device("cpu"))
    context = RewardContext(
        num_tokens=[sample.num_tokens for sample in table.samples],
        stop_reasons=[sample.stop_reason for sample in table.samples],
        extras=[{}] * len(sequences),
        max_new_tokens=NUM_POSITIONS,
        sequences=sequences,
    )
    prompts = [ROWS[sample.prompt_index].prompt for sample in table.samples]
    assert found == part(prompts, [sample.answer for sample in table.samples], context)


def test_answers_that_fill_the_context_have_a_divergence(tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = build_tiny_checkpoint(tmp_path / "other", seed=5)
    table = answers(tiny_checkpoint)
    sources = [ModelSource.of(name, path) for name, path in (("candidate", other), ("reference", tiny_checkpoint))]
    settings: dict[str, Any] = {"dtype": "float32", "temperature": 0.7, "max_tokens_per_batch": 1024}
    values = kl_to_reference(*sources, table, ROWS, **settings)
    assert all(value is not None and math.isfinite(value) for value in values)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("limit", [64, 200])
def test_no_forward_pass_is_larger_than_its_bound(
    tiny_checkpoint: Path, reward_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Also where all conversations start alike; a longer one is a batch of its own."""
    other = build_tiny_checkpoint(tmp_path / "other", seed=5)
    tokens, eos = (301, 302, 303), load_tokenizer(tiny_checkpoint).eos_token_id
    samples = [Sample(i % 2, i, (*tokens, 310 + i, eos), "x", StopReason.EOS) for i in range(12)]
    longest = max(len(prompt_ids_of(tiny_checkpoint)[s.prompt_index]) + len(s.token_ids) for s in samples)
    shapes: list[torch.Size] = []
    forward = LlamaModel.forward

    def seen(self: Any, *arguments: Any, **inputs: Any) -> Any:
        shapes.append(inputs["input_ids"].shape)
        assert inputs.get("past_key_values") is None
        return forward(self, *arguments, **inputs)

    monkeypatch.setattr(LlamaModel, "forward", seen)
    sources = [ModelSource.of(name, path) for name, path in (("candidate", other), ("reference", tiny_checkpoint))]
    RewardScorer(reward_folder, limit).score(sources[1], ModelSamples(samples), ROWS, PROMPTS)
    kl_to_reference(*sources, ModelSamples(samples), ROWS, dtype="float32", temperature=1.0, max_tokens_per_batch=limit)
    assert max(shape[1] for shape in shapes) == longest
    assert all(shape.numel() <= max(limit, longest) for shape in shapes)
    assert sum(shape[0] for shape in shapes) == 3 * len(samples)


def test_an_answer_beyond_the_reward_models_positions_is_counted(
    tiny_checkpoint: Path, reward_folder: Path, tmp_path: Path
) -> None:
    short = with_positions(reward_folder, tmp_path / "short", NUM_POSITIONS - 1)
    table, source = answers(tiny_checkpoint), ModelSource.of("candidate", tiny_checkpoint)
    scores = scorer_of(short).score(source, table, ROWS, PROMPTS)
    assert [score is None for score in scores] == [False, True, False, True]
    add_scores("candidate", table, "reward_model_score", scores, PROMPTS)
    entry = summarise_model(source, table, PROMPTS, ["reward_model_score"])
    assert entry["num_missing"] == {"reward_model_score": 2}
    assert entry["means"]["reward_model_score"] == pytest.approx((scores[0] + scores[2]) / 2)


def test_a_model_with_another_tokenizer_is_scored_by_its_text(
    tiny_checkpoint: Path, reward_folder: Path, tmp_path: Path
) -> None:
    """And its full context, encoded anew, has more or fewer tokens: too many have no score, and raise nothing."""
    champion = build_tiny_checkpoint(tmp_path / "champion", seed=2, vocab_size=400)
    source = ModelSource.of("champion", champion)
    texts = ["A cold river.", "no " * NUM_POSITIONS]
    samples = [
        Sample(0, number, (5,), text, reason)
        for number, (text, reason) in enumerate(zip(texts, (StopReason.EOS, StopReason.LENGTH), strict=True))
    ]
    scorer = scorer_of(reward_folder)
    scores = scorer.score(source, ModelSamples(samples), ROWS, PROMPTS)
    assert scores[1] is None
    tokenizer = load_tokenizer(tiny_checkpoint)
    written = (*tokenizer(texts[0], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    own = ModelSamples([Sample(0, 0, written, texts[0], StopReason.EOS)])
    reference = ModelSource.of("reference", tiny_checkpoint)
    assert scores[0] == pytest.approx(scorer.score(reference, own, ROWS, PROMPTS)[0], abs=1e-5)
