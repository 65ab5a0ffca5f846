"""Rewards: every rule by hand, missing is not zero, and the reward model's part."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_scorer import local_scorer
from pydantic import TypeAdapter, ValidationError

from training_core.config.algorithms import PolicyStageConfig
from training_core.config.evaluation import EvaluateStageConfig
from training_core.config.rewards import RewardConfig, RewardModelReward, check_part_names
from training_core.errors import ConfigurationError, EvaluationError
from training_core.models.chat import encode_conversation
from training_core.models.heads import (
    load_reward_model,
    new_reward_model,
    save_reward_model,
    score_token_ids,
)
from training_core.models.loading import load_tokenizer
from training_core.records import Message, StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards.base import RewardContext
from training_core.rewards.combine import RewardPart, reward_part, score_answers
from training_core.rewards.model import load_reward_part

PROMPTS = [[Message(role="user", content="Say something.")]] * 3
CONFIGS = TypeAdapter(RewardConfig)


def context(num_tokens: list[int], reasons: list[StopReason] | None = None, **extra: Any) -> RewardContext:
    return RewardContext(
        num_tokens=num_tokens,
        stop_reasons=reasons or [StopReason.EOS] * len(num_tokens),
        extras=[extra] * len(num_tokens),
        max_new_tokens=16,
    )


CUSTOM_MODULE = """
def by_length(prompts, answers, context, *, scale):
    return [None if answer == "" else scale * len(answer) for answer in answers]
"""


EXAMPLES: dict[str, tuple[dict[str, Any], list[str], RewardContext, list[float | None]]] = {
    "length": (
        {"min_tokens": 4, "max_tokens": 6, "slack_tokens": 4},
        ["a", "b", "c"],
        context([5, 8, 30]),
        [1, 0.5, 0],
    ),
    "regex": ({"pattern": r"\d+", "match": "full"}, [" 12 ", "12 a", "x"], context([1, 1, 1]), [1, 0, 0]),
    "contains": ({"phrases": ["Sea", "tide"]}, ["the SEA", "sea and tide", ""], context([1, 1, 1]), [0.5, 1, 0]),
    "exact_match": ({}, ["forty  two", "Forty two", "41"], context([1, 1, 1], reference="forty two"), [1, 0, 0]),
    "numeric_match": (
        {"marker": "####"},
        ["#### 1,000", "1000", "#### 7"],
        context([1] * 3, reference=1000),
        [1, 0, 0],
    ),
    "math_verify": ({}, [r"$\frac{2}{4}$", "$2$", "none"], context([1] * 3, reference="1/2"), [1, 0, 0]),
    "code_tests": (
        {"network": "allow"},
        ["```python\nprint(2 * int(input()))\n```", "print(4)", "no code"],
        context([1] * 3, tests=[{"stdin": "2", "expected_stdout": "4"}, {"stdin": "3\n", "expected_stdout": "6\n"}]),
        [1, 0.5, 0],
    ),
    "http": ({"url": "set by the test"}, ["a", "abc"], context([1, 1]), [1, 3]),
    "format": (
        {"sections": [{"start": "<answer>", "end": "</answer>"}]},
        ["<answer>4</answer>", "4", "so <answer>4</answer>"],
        context([1] * 3),
        [1, 0, 0],
    ),
    "truncation": ({}, ["a", "b"], context([3, 16], [StopReason.EOS, StopReason.LENGTH]), [0, -1]),
    "soft_overlong": (
        {"buffer_tokens": 8},
        ["a", "b", "c"],
        context([7, 11, 16], [StopReason.EOS, StopReason.EOS, StopReason.LENGTH]),
        [0, -0.5, -1],
    ),
    "repetition": ({"ngram": 2}, ["a b a b a b", "a b c d", "a"], context([6, 4, 1]), [-0.6, 0, 0]),
    "sentiment": ({}, ["", "the table"], context([0, 2]), [0, 0]),
    "custom": (
        {"import_path": "custom_reward_example:by_length", "parameters": {"scale": 2.0}},
        ["ab", ""],
        context([1, 0]),
        [4, None],
    ),
}


@pytest.mark.parametrize("kind", list(REWARD_RULES))
def test_every_rule_by_hand(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_reward_example.py").write_text(CUSTOM_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    knobs, answers, about, expected = EXAMPLES[kind]
    with local_scorer() as server:
        address = {"url": server.url} if kind == "http" else {}
        rule = REWARD_RULES[kind](CONFIGS.validate_python({"kind": kind, **knobs, **address}))
        assert rule(PROMPTS[: len(answers)], answers, about) == pytest.approx(expected)


def test_sentiment_has_a_sign() -> None:
    rule = REWARD_RULES["sentiment"](CONFIGS.validate_python({"kind": "sentiment"}))
    good, bad = rule(PROMPTS[:2], ["What a wonderful, happy day!", "What a terrible, sad day."], context([6, 6]))
    assert good is not None
    assert bad is not None
    assert good > 0.5 > -0.3 > bad


def test_exact_match_without_a_reference_is_missing() -> None:
    rule = REWARD_RULES["exact_match"](CONFIGS.validate_python({"kind": "exact_match"}))
    assert rule(PROMPTS[:1], ["x"], context([1])) == [None]


def part(name: str, weight: float, scores: list[float | None]) -> RewardPart:
    return RewardPart(name, weight, lambda prompts, answers, context: scores)


def test_parts_add_up_with_weights_and_missing_is_not_zero() -> None:
    parts = [part("a", 2.0, [1.0, None, 0.0]), part("b", -1.0, [0.5, 0.5, 0.0])]
    combined = score_answers(parts, PROMPTS, ["x", "y", "z"], context([1, 1, 1]))
    assert combined.totals == [1.5, None, 0.0]
    assert combined.num_missing == 1
    metrics = combined.metrics()
    assert metrics["reward/a_mean"] == 0.5
    assert metrics["reward/b_mean"] == pytest.approx(1 / 3)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == 0.75
    assert metrics["reward/missing_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_an_error(score: float) -> None:
    with pytest.raises(EvaluationError, match="must be finite"):
        score_answers([part("a", 1.0, [score])], PROMPTS[:1], ["x"], context([1]))


def test_a_wrong_number_of_scores_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="2 scores for 1 answers"):
        score_answers([part("a", 1.0, [1.0, 2.0])], PROMPTS[:1], ["x"], context([1]))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "regex", "pattern": "("}, "not a regular expression"),
        ({"kind": "contains", "phrases": [" "]}, "empty"),
        ({"kind": "length", "min_tokens": 9, "max_tokens": 8}, "must not exceed"),
        ({"kind": "custom", "import_path": "no_colon"}, "pattern"),
        ({"kind": "sentiment", "ngram": 4}, "Extra inputs"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CONFIGS.validate_python(config)


def test_part_names_must_differ() -> None:
    twice = [CONFIGS.validate_python({"kind": "sentiment"})] * 2
    with pytest.raises(ValueError, match="two rewards are called sentiment"):
        check_part_names(twice)
    with pytest.raises(ValueError, match="at least one reward"):
        check_part_names([])


def test_a_custom_reward_that_cannot_be_imported_is_a_configuration_error() -> None:
    config = CONFIGS.validate_python({"kind": "custom", "import_path": "no.such.module:score"})
    with pytest.raises(ConfigurationError, match=r"no\.such\.module"):
        REWARD_RULES["custom"](config)


def test_a_custom_reward_whose_module_fails_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "custom_reward_unfinished.py").write_text("def score(prompts:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = CONFIGS.validate_python({"kind": "custom", "import_path": "custom_reward_unfinished:score"})
    with pytest.raises(ConfigurationError, match="SyntaxError"):
        REWARD_RULES["custom"](config)


def test_a_custom_reward_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_reward_raising.py").write_text(
        "def score(prompts, answers, context):\n    return {}[answers[0]]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = CONFIGS.validate_python({"kind": "custom", "import_path": "custom_reward_raising:score"})
    with pytest.raises(EvaluationError, match=r"custom_reward_raising:score raised KeyError\('x'\) on 1 answers"):
        REWARD_RULES["custom"](config)(PROMPTS[:1], ["x"], context([1]))


def test_an_overlong_buffer_beyond_a_whole_answer_is_refused_before_anything_is_sampled() -> None:
    rule = {"kind": "soft_overlong", "buffer_tokens": 17}
    rollout = {"engine": "transformers", "max_new_tokens": 16}
    algorithm = {"name": "grpo", "num_steps": 1, "optimizer": {"learning_rate": 1e-3}}
    with pytest.raises(ValidationError, match="at most max_new_tokens = 16"):
        PolicyStageConfig.model_validate({"algorithm": algorithm, "rollout": rollout, "rewards": [rule]})
    with pytest.raises(ValidationError, match="at most max_new_tokens = 16"):
        EvaluateStageConfig.model_validate({"evaluation": {"metrics": [rule]}, "rollout": rollout})
    longer = {"metrics": [rule], "sampling": {"max_new_tokens": 17}}
    assert EvaluateStageConfig.model_validate({"evaluation": longer, "rollout": rollout}).max_new_tokens == 17


def test_the_reward_model_part_normalises_and_clips(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = new_reward_model(tiny_checkpoint, seed=0)
    model.score_mean, model.score_std = 0.25, 0.5
    save_reward_model(model, tiny_checkpoint, tmp_path / "rm", {})
    answers = ["a river", "bread"]
    tokenizer = load_tokenizer(tiny_checkpoint)
    ids = [encode_conversation(tokenizer, PROMPTS[0], [Message(role="assistant", content=a)])[0] for a in answers]
    raw = score_token_ids(load_reward_model(tmp_path / "rm"), ids, 0)

    def scores(**knobs: Any) -> list[float | None]:
        config = RewardModelReward(kind="reward_model", **knobs)
        function = load_reward_part(config, tmp_path / "rm", tiny_checkpoint, torch.device("cpu"))
        return score_answers([reward_part(config, function)], PROMPTS[:2], answers, context([2, 1])).totals

    assert scores(normalise=False) == raw
    assert scores() == pytest.approx([(value - 0.25) / 0.5 for value in raw])
    assert scores(clip=1e-3) == [pytest.approx(-1e-3)] * 2


@pytest.fixture(scope="module")
def reward_folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "rm"
    save_reward_model(new_reward_model(tiny_checkpoint, seed=0), tiny_checkpoint, folder, {})
    return folder


@pytest.fixture(scope="module")
def other_tokenizer(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose ids mean nothing to the reward model: another template is another tokenizer."""
    folder = tmp_path_factory.mktemp("policy") / "other"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def part_of(reward_folder: Path, policy: Path) -> Any:
    config = RewardModelReward(kind="reward_model", normalise=False)
    return load_reward_part(config, reward_folder, policy, torch.device("cpu"))


ANSWERED = [StopReason.LENGTH, StopReason.EOS]


@pytest.mark.parametrize("num_free", [0, 1, 2])
def test_a_cut_answer_is_read_at_the_end_token_up_to_the_whole_context(
    tiny_checkpoint: Path, reward_folder: Path, num_free: int
) -> None:
    """Where the context is full there is room for an end-of-turn token in the last place only."""
    model, eos = load_reward_model(reward_folder), load_tokenizer(tiny_checkpoint).eos_token_id
    limit = model.backbone.config.max_position_embeddings
    cut = tuple(5 + i % 200 for i in range(limit - num_free))
    about = replace(context([limit - 3, 1], ANSWERED), sequences=[cut, (5, 6, 7, eos)])
    found = part_of(reward_folder, tiny_checkpoint)(PROMPTS[:2], ["not looked at", "nor this"], about)
    assert found == score_token_ids(model, [(*cut, eos) if num_free else (*cut[:-1], eos), (5, 6, 7, eos)], 0)


def test_an_answer_is_read_at_the_end_token_of_training(tiny_checkpoint: Path, reward_folder: Path) -> None:
    """A policy may have several end-of-answer tokens; the reward model never saw the others at an answer's end."""
    model, eos = load_reward_model(reward_folder), load_tokenizer(tiny_checkpoint).eos_token_id
    about = replace(context([2, 2], [StopReason.EOS] * 2), sequences=[(5, 6, 7, 9), (5, 6, 7, eos)])
    found = part_of(reward_folder, tiny_checkpoint)(PROMPTS[:2], ["x", "x"], about)
    assert found == [score_token_ids(model, [(5, 6, 7, eos)], 0)[0]] * 2


def test_another_tokenizer_reads_the_text_and_ends_an_answer_that_was_cut(
    tiny_checkpoint: Path, reward_folder: Path, other_tokenizer: Path
) -> None:
    model, tokenizer = load_reward_model(reward_folder), load_tokenizer(tiny_checkpoint)
    about = replace(context([2, 1], ANSWERED), sequences=[(1, 2), (3, 4)])
    answers = ["a river", "bread"]
    found = part_of(reward_folder, other_tokenizer)(PROMPTS[:2], answers, about)
    whole = [
        encode_conversation(tokenizer, PROMPTS[0], [Message(role="assistant", content=answer)])[0] for answer in answers
    ]
    assert found == score_token_ids(model, whole, 0)


def test_a_cut_text_that_fills_the_context_has_a_score(
    tiny_checkpoint: Path, reward_folder: Path, other_tokenizer: Path
) -> None:
    """Encoded with its end it is one token too long; it is scored with the end in the last place."""
    model, tokenizer = load_reward_model(reward_folder), load_tokenizer(tiny_checkpoint)
    limit = model.backbone.config.max_position_embeddings

    def encoded(answer: str) -> list[int]:
        return encode_conversation(tokenizer, PROMPTS[0], [Message(role="assistant", content=answer)])[0]

    # "!" is a token of its own however many there are.
    answer = "!" * (limit - len(encoded("!")) + 2)
    whole = encoded(answer)
    assert len(whole) == limit + 1
    about = context([1], [StopReason.LENGTH])
    found = part_of(reward_folder, other_tokenizer)(PROMPTS[:1], [answer], about)
    assert found == score_token_ids(model, [[*whole[:-2], tokenizer.eos_token_id]], 0)


def test_a_conversation_beyond_the_reward_models_positions_is_missing(
    tiny_checkpoint: Path, reward_folder: Path, other_tokenizer: Path
) -> None:
    model = load_reward_model(reward_folder)
    limit = model.backbone.config.max_position_embeddings
    sequences = [[5] * (limit + 1), [5, 6, 7]]
    about = replace(context([limit - 3, 1], [StopReason.LENGTH] * 2), sequences=sequences)
    [missing, score] = part_of(reward_folder, tiny_checkpoint)(PROMPTS[:2], ["x", "y"], about)
    assert missing is None
    assert score == score_token_ids(model, [[5, 6, 7, load_tokenizer(tiny_checkpoint).eos_token_id]], 0)[0]
    combined = score_answers(
        [RewardPart("model", 1.0, part_of(reward_folder, other_tokenizer))], PROMPTS[:2], ["no " * limit, "y"], about
    )
    assert [total is None for total in combined.totals] == [True, False]
    assert combined.metrics()["reward/missing_fraction"] == 0.5
