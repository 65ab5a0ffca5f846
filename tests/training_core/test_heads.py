"""The reward model's head: one score a row, whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from training_core.data.batching import pad_sequences
from training_core.errors import ArtifactError, DataError, EvaluationError
from training_core.models.heads import (
    RewardModel,
    load_reward_model,
    new_reward_model,
    save_reward_model,
    save_score_scale,
    score_token_ids,
)

SEQUENCES = [[7, 8, 9, 10, 11, 12, 2], [40, 41, 2], [3, 3, 5, 2], [100, 200, 300, 400, 500, 6, 7, 8, 9, 2]]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> RewardModel:
    model = new_reward_model(tiny_checkpoint, seed=1)
    # As after training: scores of the order of one, so that a tolerance means something.
    with torch.no_grad():
        model.head.weight.mul_(129.0)
    return model


def test_score_does_not_depend_on_padding(model: RewardModel) -> None:
    alone = torch.tensor([score_token_ids(model, [s], 0)[0] for s in SEQUENCES])
    assert alone.std() > 0.1
    for side in ("left", "right"):
        for pad_token_id in (0, 3):
            for extra in (0, 5):
                wide = [*SEQUENCES, [1] * (10 + extra)]
                ids, mask = pad_sequences(wide, pad_token_id, side)  # type: ignore[arg-type]
                scores = model(ids, mask)[:4].detach()
                assert torch.allclose(scores, alone, atol=1e-5), (side, pad_token_id, extra)


def test_padding_on_both_sides_is_respected(model: RewardModel) -> None:
    ids, mask = pad_sequences(SEQUENCES[:1], 0)
    both = torch.nn.functional.pad(ids, (2, 3), value=3), torch.nn.functional.pad(mask, (2, 3), value=False)
    assert torch.allclose(model(*both), model(ids, mask), atol=1e-5)


def test_gradient_does_not_depend_on_padding(model: RewardModel) -> None:
    gradients = []
    for side in ("left", "right"):
        ids, mask = pad_sequences(SEQUENCES, 0, side)  # type: ignore[arg-type]
        model.zero_grad()
        model(ids, mask).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    for left, right in zip(*gradients, strict=True):
        assert torch.isfinite(left).all()
        assert torch.allclose(left, right, atol=1e-4)


def test_a_row_without_tokens_is_refused(model: RewardModel) -> None:
    with pytest.raises(DataError, match="without any real token"):
        model(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.bool))


def test_equal_sequences_are_scored_once_and_get_equal_scores(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    forward = RewardModel.forward

    def counted(self: RewardModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(ids))
        return forward(self, ids, mask)

    monkeypatch.setattr(RewardModel, "forward", counted)
    # Batches of two: without care the copies of a sequence fall into batches of other widths.
    scores = score_token_ids(model, [SEQUENCES[0], *SEQUENCES, *SEQUENCES], 3, max_tokens_per_batch=20)
    assert sum(num_rows) == len(SEQUENCES)
    assert scores[0] == scores[1]
    assert scores[1:5] == scores[5:]
    assert len(set(scores)) == len(SEQUENCES)


def test_scores_come_in_the_order_of_the_input(model: RewardModel) -> None:
    whole = score_token_ids(model, SEQUENCES, 3, max_tokens_per_batch=1000)
    assert score_token_ids(model, SEQUENCES, 3, max_tokens_per_batch=1) == pytest.approx(whole, abs=1e-5)
    backwards = score_token_ids(model, SEQUENCES[::-1], 3)
    assert backwards[::-1] == pytest.approx(whole, abs=1e-5)
    assert score_token_ids(model, SEQUENCES, 3) == score_token_ids(model, SEQUENCES, 3)
    assert score_token_ids(model, [], 3) == []


def test_the_head_stays_float32_under_autocast(model: RewardModel) -> None:
    ids, mask = pad_sequences(SEQUENCES, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(ids, mask)
    assert scores.dtype == torch.float32
    exact = score_token_ids(model, SEQUENCES, 3)
    assert scores.tolist() == pytest.approx(exact, abs=0.05)
    assert scores.tolist() != exact


def test_too_long_and_not_finite_are_errors(model: RewardModel, tiny_checkpoint: Path) -> None:
    with pytest.raises(DataError, match="513 tokens, the model's limit is 512"):
        score_token_ids(model, [[5] * 513], 3)
    broken = new_reward_model(tiny_checkpoint, seed=0)
    with torch.no_grad():
        broken.head.weight.fill_(float("nan"))
    with pytest.raises(EvaluationError, match="nan"):
        score_token_ids(broken, SEQUENCES, 3)


def test_saved_and_loaded_scores_the_same_here_and_in_transformers(
    model: RewardModel, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model.score_mean, model.score_std = 0.5, 2.0
    save_reward_model(model, tiny_checkpoint, tmp_path, {"accuracy": 1.0})
    again = load_reward_model(tmp_path)
    expected = score_token_ids(model, SEQUENCES, 3)
    assert score_token_ids(again, SEQUENCES, 3) == expected
    assert (again.score_mean, again.score_std) == (0.5, 2.0)
    assert again.normalise(4.5) == 2.0
    ids, mask = pad_sequences(SEQUENCES[1:2], 3)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert theirs(input_ids=ids, attention_mask=mask).logits.item() == pytest.approx(expected[1], abs=1e-5)
    model.score_mean, model.score_std = 0.0, 1.0


def test_it_is_loaded_in_the_dtype_it_was_saved_in(model: RewardModel, tiny_checkpoint: Path, tmp_path: Path) -> None:
    save_reward_model(model, tiny_checkpoint, tmp_path, {"accuracy": 1.0}, torch.bfloat16)
    again = load_reward_model(tmp_path)
    assert (again.dtype, again.head.weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(again.head.weight, model.head.weight)
    for ours, theirs in zip(again.backbone.parameters(), model.backbone.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))
    assert model.dtype == torch.float32
    again.score_mean, again.score_std = -1.5, 3.0
    save_score_scale(again, tmp_path, {"accuracy": 0.5})
    third = load_reward_model(tmp_path)
    assert (third.score_mean, third.score_std) == (-1.5, 3.0)
    assert json.loads((tmp_path / "reward_config.json").read_text())["accuracy"] == 0.5
    assert score_token_ids(third, SEQUENCES, 3) == score_token_ids(again, SEQUENCES, 3)
    assert score_token_ids(third, SEQUENCES, 3) != score_token_ids(model, SEQUENCES, 3)


def test_the_fresh_head_depends_on_the_seed_only(tiny_checkpoint: Path) -> None:
    one, two, three = (new_reward_model(tiny_checkpoint, seed=s).head.weight for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_a_folder_without_reward_model_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ArtifactError, match="no reward model can be loaded"):
        load_reward_model(tiny_checkpoint)


@pytest.mark.parametrize("key", ["score_mean", "score_std", "base_prefix"])
def test_a_reward_config_without_its_scale_is_refused(
    model: RewardModel, tiny_checkpoint: Path, tmp_path: Path, key: str
) -> None:
    save_reward_model(model, tiny_checkpoint, tmp_path, {})
    path = tmp_path / "reward_config.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key}))
    with pytest.raises(ArtifactError, match=key):
        load_reward_model(tmp_path)
