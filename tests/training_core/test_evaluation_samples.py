"""Config of the evaluation, its table, its state and its summary."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from scipy import stats

from training_core.config.evaluation import EvaluateStageConfig, EvaluationConfig
from training_core.errors import EvaluationError
from training_core.evaluation.generation import ModelSource
from training_core.evaluation.measures import measure_answers
from training_core.evaluation.samples import (
    EvaluationPrompt,
    ModelSamples,
    Sample,
    add_scores,
    load_state,
    read_scores,
    save_state,
    write_table,
)
from training_core.evaluation.scoring import answer_logprobs
from training_core.evaluation.summary import summarise_model
from training_core.models.chat import encode_prompt
from training_core.models.loading import load_causal_lm, load_tokenizer
from training_core.records import Message, PromptRow, StopReason
from training_core.stages.evaluate import show_messages

PROMPTS = [EvaluationPrompt(f"p{i}", f"g{i}", f"prompt {i}") for i in range(3)]
ROWS = [PromptRow(prompt_id=f"p{i}", prompt=[Message(role="user", content="x")]) for i in range(3)]


def table(*answers: str) -> ModelSamples:
    return ModelSamples([Sample(i, 0, (4, 5, 2), text, StopReason.EOS) for i, text in enumerate(answers)])


def test_metric_names_are_the_columns_in_order():
    config = EvaluationConfig.model_validate(
        {
            "metrics": [{"kind": "sentiment"}, {"kind": "regex", "name": "polite", "pattern": "please"}],
            "reward_model": True,
        }
    )
    assert config.metric_names() == [
        "sentiment", "polite", "reward_model_score", "kl_to_reference", "length_tokens", "truncated", "repetition",
        "same_opening",
    ]  # fmt: skip
    assert EvaluationConfig(kl=False).metric_names() == ["length_tokens", "truncated", "repetition", "same_opening"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([{"kind": "repetition"}], "taken by a built-in"),
        ([{"kind": "sentiment", "name": "num_tokens"}], "taken by a built-in"),
        ([{"kind": "sentiment"}, {"kind": "sentiment"}], "two metrics are called 'sentiment'"),
        ([{"kind": "reward_model"}], "reward_model"),
    ],
)
def test_metric_names_that_clash_are_refused(metrics, message):
    with pytest.raises(ValidationError, match=message):
        EvaluationConfig.model_validate({"metrics": metrics})
    assert EvaluationConfig.model_validate({"metrics": [{"kind": "repetition", "name": "repeats"}]}).metrics


def test_the_answers_length_comes_from_the_rollout_unless_given():
    rollout = {"engine": "transformers", "max_new_tokens": 40}
    assert EvaluateStageConfig.model_validate({"evaluation": {}, "rollout": rollout}).max_new_tokens == 40
    sampling = {"sampling": {"max_new_tokens": 9}}
    assert EvaluateStageConfig.model_validate({"evaluation": sampling, "rollout": rollout}).max_new_tokens == 9


def test_state_survives_a_round_trip_with_any_text(tmp_path: Path):
    whole = table("plain", "lone \ud83d surrogate", "")
    whole.samples[2] = Sample(2, 0, (7,), "", StopReason.LENGTH)
    add_scores("reference", whole, "m", [1.0, None, 0.1 + 0.2], PROMPTS)
    save_state(tmp_path, {"reference": whole})
    assert load_state(tmp_path) == {"reference": whole}
    write_table(tmp_path / "samples.parquet", {"reference": whole}, PROMPTS, ["m"])
    columns = pq.read_table(tmp_path / "samples.parquet").to_pydict()
    assert columns["answer"] == ["plain", "lone ? surrogate", ""]
    assert columns["num_tokens"] == [2, 2, 1]
    assert columns["m"] == [1.0, None, 0.1 + 0.2]


def test_scores_that_are_too_few_or_not_finite_are_refused():
    with pytest.raises(EvaluationError, match="gave 1 scores for the candidate's 3 answers"):
        add_scores("candidate", table("a", "b", "c"), "m", [1.0], PROMPTS)
    with pytest.raises(EvaluationError, match=r"'m' of the candidate's answer 0 to prompt 'p1' is nan: 'b'"):
        add_scores("candidate", table("a", "b", "c"), "m", [1.0, math.nan, 2.0], PROMPTS)


def test_built_in_measures():
    whole = ModelSamples(
        [
            Sample(0, 0, (4, 5, 2), "a b c d a b c d", StopReason.EOS),
            Sample(1, 0, (4, 5, 6), "one two three", StopReason.LENGTH),
        ]
    )
    measure_answers("candidate", whole, ROWS, PROMPTS, [], 3)
    assert whole.scores["length_tokens"] == [2.0, 3.0]
    assert whole.scores["truncated"] == [0.0, 1.0]
    assert whole.scores["repetition"] == [pytest.approx(0.2), 0.0]


def test_summary_means_leave_missing_scores_out_and_count_them():
    whole = table("a", "b", "c")
    add_scores("candidate", whole, "m", [1.0, None, 4.0], PROMPTS)
    add_scores("candidate", whole, "none", [None, None, None], PROMPTS)
    source = ModelSource("candidate", Path(), "w", "t", "a")
    entry = summarise_model(source, whole, PROMPTS, ["m", "none"])
    assert entry["means"] == {"m": 2.5, "none": None}
    assert entry["standard_errors"] == {"m": pytest.approx(stats.sem([1.0, 4.0])), "none": None}
    assert entry["num_missing"] == {"m": 1, "none": 3}
    assert entry["num_samples"] == 3


def test_an_unreadable_table_is_refused(tmp_path: Path):
    path = tmp_path / "samples.parquet"
    with pytest.raises(EvaluationError, match="no readable samples table"):
        read_scores(path, {})
    path.write_bytes(b"not parquet")
    with pytest.raises(EvaluationError, match="no readable samples table"):
        read_scores(path, {})


def test_answer_logprobs_equal_a_plain_softmax(tiny_checkpoint: Path):
    model, tokenizer = load_causal_lm(tiny_checkpoint), load_tokenizer(tiny_checkpoint)
    prompt = encode_prompt(tokenizer, [Message(role="user", content="Say something.")])
    sequences = [(prompt, [5, 6, 7]), (prompt[:4], [9]), (prompt, [8] * 9)]
    found = answer_logprobs(model, sequences, temperature=0.7, max_tokens_per_batch=60)
    for (start, answer), total in zip(sequences, found, strict=True):
        ids = torch.tensor([[*start, *answer]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(start) - 1 : -1] / 0.7
        expected = torch.log_softmax(logits, dim=-1)[torch.arange(len(answer)), torch.tensor(answer)].sum()
        assert total == pytest.approx(float(expected), abs=1e-4)


def test_prompts_of_several_turns_are_shown_with_their_roles():
    messages = [Message(role="system", content="Be kind."), Message(role="user", content="Hi")]
    assert show_messages(messages) == "system: Be kind.\n\nuser: Hi"
