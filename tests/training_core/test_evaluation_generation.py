"""Answers as the evaluation's table holds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from training_core.config.evaluation import EvaluateStageConfig
from training_core.evaluation.generation import EnginePool, ModelSource
from training_core.models.loading import load_tokenizer
from training_core.models.tiny import build_tiny_checkpoint
from training_core.records import Message, PromptRow, StopReason

ROWS = [PromptRow(prompt_id=f"p{i}", prompt=[Message(role="user", content=f"Number {i}?")], extra={}) for i in range(8)]
CONFIG = {
    "evaluation": {"samples_per_prompt": 2, "sampling": {"temperature": 1.0}},
    "rollout": {"engine": "transformers", "dtype": "float32", "max_new_tokens": 8, "max_num_sequences": 8},
}


def test_an_end_token_that_is_not_special_is_no_part_of_the_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A model may end its answers with any id; the reward rules of training do not see it either."""
    model = tmp_path / "many_ends"
    shutil.copytree(tiny_checkpoint, model)
    generation = json.loads((model / "generation_config.json").read_text())
    ordinary = list(range(300, 400))
    eos = [generation["eos_token_id"], *ordinary]
    (model / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": eos}))
    source = ModelSource.of("candidate", model)
    config = EvaluateStageConfig.model_validate(CONFIG)
    pool = EnginePool(config, [source], ROWS)
    samples = pool.sample(source, 3, lambda done: None).samples
    pool.close()
    tokenizer = load_tokenizer(model)
    ended = [sample for sample in samples if sample.token_ids[-1] in ordinary]
    assert len(ended) > 3
    for sample in ended:
        assert sample.stop_reason == StopReason.EOS
        assert sample.answer == tokenizer.decode(sample.token_ids[:-1], skip_special_tokens=True)
        assert sample.answer != tokenizer.decode(sample.token_ids, skip_special_tokens=True)


def test_a_mixture_of_experts_is_sampled_like_any_model(tmp_path: Path) -> None:
    """Its weights have other names in memory than in the file; the engine knows those of the file."""
    model = build_tiny_checkpoint(tmp_path / "mixture", 1, architecture="qwen3_moe")
    source = ModelSource.of("candidate", model)
    pool = EnginePool(EvaluateStageConfig.model_validate(CONFIG), [source], ROWS)
    assert len(pool.sample(source, 3, lambda done: None).samples) == 2 * len(ROWS)
    pool.close()
