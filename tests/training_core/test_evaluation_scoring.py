"""Scores of an evaluation that need a model: the reward model's are those of RL, and a full context is no accident."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from training_core.config.rewards import RewardModelReward
from training_core.data.batching import pad_sequences
from training_core.evaluation.generation import ModelSource
from training_core.evaluation.samples import EvaluationPrompt, ModelSamples, Sample, add_scores
from training_core.evaluation.scoring import RewardScorer, kl_to_reference
from training_core.evaluation.summary import summarise_model
from training_core.models.chat import decode_answer, encode_prompt
from training_core.models.heads import load_reward_model, new_reward_model, save_reward_model, score_token_ids
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.models.prefix import SharedPrefix, common_prefix
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


def scorer_of(folder: Path, *, share_prefix: bool = False) -> RewardScorer:
    return RewardScorer(folder, "float32", 4096, share_prefix=share_prefix)


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


def test_evaluation_scores_with_the_function_of_training(tiny_checkpoint: Path, reward_folder: Path) -> None:
    """To the last bit, for answers that ended and for answers that fill the context exactly."""
    table = answers(tiny_checkpoint)
    source = ModelSource.of("candidate", tiny_checkpoint)
    found = scorer_of(reward_folder).score(source, table, ROWS, PROMPTS)
    sequences = [[*prompt_ids_of(tiny_checkpoint)[s.prompt_index], *s.token_ids] for s in table.samples]
    assert {len(ids) for ids in sequences[1::2]} == {NUM_POSITIONS}
    model = load_reward_model(reward_folder)
    assert found == [model.normalise(score) for score in score_token_ids(model, sequences, 0)]
    config = RewardModelReward(kind="reward_model", dtype="float32")
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
    values = kl_to_reference(*sources, table, ROWS, share_prefix=False, **settings)
    assert all(value is not None and math.isfinite(value) for value in values)
    assert len(set(values)) == len(values)
    shared = kl_to_reference(*sources, table, ROWS, share_prefix=True, **settings)
    assert shared != values
    assert shared == pytest.approx(values, rel=1e-5, abs=1e-3)


def test_scores_are_the_same_with_a_shared_prefix(tiny_checkpoint: Path, reward_folder: Path) -> None:
    table, source = answers(tiny_checkpoint), ModelSource.of("candidate", tiny_checkpoint)
    plain = scorer_of(reward_folder).score(source, table, ROWS, PROMPTS)
    shared = scorer_of(reward_folder, share_prefix=True).score(source, table, ROWS, PROMPTS)
    assert shared != plain
    assert shared == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_hidden_states_after_a_prefix_are_those_of_whole_sequences(tiny_checkpoint: Path, num_rows: int) -> None:
    """Whatever is padded on the right, and however often the prefix is used."""
    backbone = load_causal_lm(tiny_checkpoint).base_model
    start = list(range(20, 40))
    ends = [[5], [6, 7, 8, 9], [10, 11]][:num_rows]
    prefix = SharedPrefix(backbone, start)
    ids, mask = pad_sequences(ends, pad_token_id=3)
    for _ in range(2):
        found = prefix.hidden(ids)
        for row, end in enumerate(ends):
            with torch.no_grad():
                whole = backbone(input_ids=torch.tensor([[*start, *end]]), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(found[row, mask[row]], whole[len(start) :], rtol=1e-4, atol=1e-5)


def test_a_prefix_is_what_all_share_and_leaves_each_a_rest() -> None:
    start = tuple(range(9))
    assert common_prefix([(*start, 4), (*start, 5), (*start, 4, 6)]) == list(start)
    assert common_prefix([start, (*start, 5)]) == list(start[:-1])
    assert common_prefix([(*start[:8], 99, 1), (*start, 1), (*start, 1, 2)]) == list(start[:8])
    # Too short to be worth a pass, or nothing to share it with.
    assert common_prefix([(*start[:7], 50), (*start, 1)]) == []
    assert common_prefix([start]) == common_prefix([]) == []


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
