"""One small file in each layout of pairs, with the column names of the data sets: what its rows become."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from pair_fixtures import FOLDER, load, plain
from pair_fixtures import convert as convert_row

from data_checks.config import FeedbackFormat, PairFormat, PromptFormat, StepwiseFormat
from data_checks.detection import detect
from data_checks.formats import FORMATS
from data_checks.formats.registry import PAIR_FORMATS
from data_checks.rows import Dropped, PairRow, Policy
from data_checks.rules import pair_findings

EGG, EGG_GOOD, EGG_BAD = "How long do I boil an egg?", "Seven minutes for a firm yolk.", "Until it feels right."
RIVER, RIVER_GOOD, RIVER_BAD = "Name a river in France.", "The Loire is one.", "France has rivers."
ASKED = ("user", EGG)


def convert(name: str, format_name: str, **options: Any) -> list[list[Any]]:
    """Return what each row of a fixture becomes."""
    return [convert_row(value, format_name, number, **options) for number, value in enumerate(load(name), start=1)]


@dataclass(frozen=True)
class First:
    """The first pair of a file."""

    format: str
    prompt: tuple[tuple[str, str], ...] = (ASKED,)
    chosen: str = EGG_GOOD
    rejected: str = EGG_BAD
    scores: tuple[float | None, float | None, float | None] = (None, None, None)
    """Margin, chosen score, rejected score."""
    position: int | None = None
    source: str = "here"
    annotator: str | None = None


HELLO = (("user", "Hello."), ("assistant", "Hello, ask me."))
GO_ON = (ASKED, ("assistant", "Go on?"), ("user", "Yes."))
DRUMS = (
    "SUBREDDIT: r/AskNeighbours\n\nTITLE: Drums at night\n\n"
    "POST: My neighbour plays the drums at night, week 1. I asked twice.\n\nTL;DR:"
)
FIRST = {
    "trl_standard": First("pairs"),
    "trl_conversational": First("pairs", (("system", "Answer briefly."), ASKED)),
    "trl_implicit": First("pairs", scores=(0.0, None, None)),
    "hybrid": First("pairs"),
    "rlhflow": First("pairs", GO_ON, scores=(None, 4.5, 1.5)),
    "rewardbench": First("pairs"),
    "openrlhf_margin": First("pairs", scores=(3.0, None, None)),
    "hh": First("hh"),
    "hh_prompt": First("hh"),
    "ultrafeedback": First(
        "ultrafeedback",
        chosen="Seven minutes.",
        rejected="An egg is an egg.",
        scores=(None, 8, 3),
        source="evol_instruct",
    ),
    "ultrafeedback_binarized": First("ultrafeedback_binarized", scores=(None, 8.5, 5.0)),
    "summarize": First(
        "summarize",
        (("user", DRUMS),),
        " Neighbour drums at night, asked twice.",
        " Drums.",
        position=1,
        annotator="w1",
    ),
    "webgpt": First("webgpt", chosen=EGG_GOOD + " [1]", scores=(None, 0.5, -0.5), position=1),
    "shp": First("shp", scores=(None, 12, 3), position=1),
    "safe_rlhf": First("safe_rlhf", position=1),
    "helpsteer2_preference": First("helpsteer2_preference", scores=(3.0, None, None), position=1),
    "helpsteer3": First("helpsteer3", (*HELLO, ASKED), scores=(2.0, None, None), position=1),
    "nectar": First("nectar", chosen="Answer 0 to it.", rejected="Answer 6 to it.", source="lmsys-chat-1m"),
    "rewardbench2": First("rewardbench2", chosen="Seven minutes.", rejected="One."),
    "llama_factory_alpaca": First(
        "llama_factory_alpaca", (("system", "You cook."), ("user", f"{EGG}\nIt is a duck's."))
    ),
    "llama_factory_sharegpt": First("llama_factory_sharegpt", (("system", "You cook."), ASKED)),
    "llama_factory_v1": First("llama_factory_sharegpt"),
}


def test_the_config_and_the_registry_name_the_same_formats() -> None:
    assert [known.name for known in PAIR_FORMATS] == list(get_args(PairFormat))
    by_kind = {"pairs": PairFormat, "feedback": FeedbackFormat, "prompts": PromptFormat, "stepwise": StepwiseFormat}
    for kind, names in by_kind.items():
        assert {known.name for known in FORMATS.values() if known.kind == kind} == set(get_args(names))
    assert {known.name for known in FORMATS.values() if known.label_kind == "ranked"} == {
        "ultrafeedback",
        "nectar",
        "rewardbench2",
    }


def test_every_fixture_and_every_format_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("pairs_*")} == {f"pairs_{name}" for name in FIRST}
    assert {first.format for first in FIRST.values()} == set(get_args(PairFormat))


@pytest.mark.parametrize("name", FIRST)
def test_a_file_is_told_by_its_columns_and_its_first_pair_is_right(name: str) -> None:
    expected = FIRST[name]
    options = {"label": "helpful"} if name == "safe_rlhf" else {}
    every_kind = ("pairs", "feedback", "prompts", "stepwise")
    for kinds in (("pairs",), every_kind):
        evidence = detect(name, load(name), kinds, options=options)  # type: ignore[arg-type]
        assert (evidence.format, evidence.kind, evidence.decided_by) == (expected.format, "pairs", "columns")
    pair = convert(name, expected.format, **options)[0][0]
    assert isinstance(pair, PairRow)
    found = First(
        expected.format,
        plain(pair.prompt),
        pair.chosen[0].content,
        pair.rejected[0].content,
        (pair.margin, pair.chosen_score, pair.rejected_score),
        pair.chosen_position,
        pair.source,
        pair.annotator,
    )
    assert found == expected
    assert pair.rejected_prompt == pair.prompt
    assert [turn.role for turn in pair.chosen + pair.rejected] == ["assistant", "assistant"]
    assert pair_findings(pair) == []


@pytest.mark.parametrize("name", FIRST)
def test_every_row_of_a_file_is_a_pair_without_defect(name: str) -> None:
    options = {"label": "safe"} if name == "safe_rlhf" else {}
    rows = convert(name, FIRST[name].format, **options)
    assert all(rows)
    for result in (result for results in rows for result in results):
        if isinstance(result, Dropped):
            assert result.policy == Policy.PAIRS_PER_ROW
            assert name in ("nectar", "rewardbench2")
            continue
        assert isinstance(result, PairRow)
        assert pair_findings(result) == []
        assert isinstance(json.loads(result.extra), dict)


def pairs(name: str, **options: Any) -> list[PairRow]:
    """Return the first pair of each row."""
    found = [results[0] for results in convert(name, FIRST[name].format, **options)]
    assert all(isinstance(pair, PairRow) for pair in found)
    return found


@pytest.mark.parametrize(
    ("name", "ties", "positions"),
    [
        ("webgpt", [2], [1, 2, None, 1]),
        ("shp", [3], [1, 2, 1, None]),
        ("helpsteer2_preference", [2], [1, 2, None, 1]),
        ("helpsteer3", [2], [1, 2, None, 2]),
        ("summarize", [], [1, 2, 1, 2]),
        ("ultrafeedback_binarized", [1], [None] * 4),
        ("openrlhf_margin", [3], [None] * 4),
        ("trl_implicit", [0], [None] * 4),
        ("trl_standard", [], [None] * 4),
    ],
)
def test_ties_and_positions(name: str, ties: list[int], positions: list[int | None]) -> None:
    found = pairs(name)
    assert [index for index, pair in enumerate(found) if pair.is_tie] == ties
    assert [pair.chosen_position for pair in found] == positions


def test_which_answer_is_chosen_follows_the_label() -> None:
    second = {name: pairs(name)[1] for name in ("webgpt", "shp", "helpsteer2_preference", "helpsteer3")}
    for name, pair in second.items():
        assert (plain(pair.prompt)[-1], pair.chosen[0].content) == (("user", RIVER), RIVER_BAD), name
        assert pair.rejected[0].content.startswith(RIVER_GOOD)
    # A tie prefers neither: the first answer stands as chosen, and nothing says that it is better.
    assert [pair.margin for pair in pairs("helpsteer3")] == [2.0, 1.0, 0.0, 3.0]
    assert (pairs("webgpt")[2].chosen_score, pairs("webgpt")[2].rejected_score) == (0.0, 0.0)


def test_two_judgements_are_told_apart_by_the_label() -> None:
    helpful, safe = pairs("safe_rlhf", label="helpful"), pairs("safe_rlhf", label="safe")
    assert [pair.chosen_position for pair in helpful] == [1, 2, 1, 2]
    assert [pair.chosen_position for pair in safe] == [2, 2, 1, 1]
    assert json.loads(helpful[0].extra)["safer_response_id"] == 1
    assert json.loads(safe[0].extra)["better_response_id"] == 0


def test_what_stands_beside_a_pair_is_kept() -> None:
    first = pairs("trl_conversational")
    assert json.loads(first[0].tools or "") == [{"function": {"name": "clock"}, "type": "function"}]
    assert [pair.tools for pair in first[1:]] == [None] * 3
    assert {pair.extra for pair in pairs("trl_standard") + pairs("hh")} == {"{}"}
    assert json.loads(pairs("rewardbench")[0].extra)["chosen_model"] == "big"
    assert json.loads(pairs("hh_prompt")[0].extra) == {"response": f" {EGG_GOOD}"}
    assert json.loads(pairs("ultrafeedback_binarized")[0].extra) == {"prompt_id": f"{0:064x}"}
    summary = json.loads(pairs("summarize")[0].extra)
    assert summary["info"] == {"id": "t3_1"}
    assert summary["summaries"] == [{"policy": "sup1"}, {"note": "short", "policy": "ref"}]
    assert summary["extra"] == {"confidence": 8}
    web = json.loads(pairs("webgpt")[0].extra)
    assert (web["question"], web["tokens_0"]) == (
        {"dataset": "eli5", "id": "q0"},
        {"prefix": [1, 2], "completion": [3]},
    )
    assert json.loads(pairs("shp")[0].extra)["score_ratio"] == 4.0
    assert json.loads(pairs("llama_factory_v1")[0].extra) == {
        "chosen_messages_loss_weights": [0.0, 1.0],
        "rejected_messages_loss_weights": [0.0, 1.0],
    }
    sharegpt = pairs("llama_factory_sharegpt")[2]
    assert [turn.role for turn in sharegpt.prompt] == ["system", "user", "assistant", "tool"]
    assert sharegpt.tools == '[{"name": "clock"}]'
    article = plain(pairs("summarize")[3].prompt)
    assert article == (("user", "ARTICLE: The mayor opened bridge 3 today.\n\nTL;DR:"),)
