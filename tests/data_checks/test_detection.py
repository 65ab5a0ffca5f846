"""Telling a file's format from its columns, and saying why; nothing is guessed where several fit."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pair_fixtures import load

from data_checks.detection import SAMPLE_ROWS, FormatEvidence, check_options, detect, identify, refuse_unreadable
from data_checks.formats import FORMATS
from data_checks.rows import Finding, RawRow, Reason
from training_core.errors import ConfigurationError, DataError

EVERY_KIND = ("pairs", "feedback", "prompts", "stepwise")
HH = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
JUDGED = {"prompt": "a", "completion": "b", "label": True}


def test_evidence_says_what_was_counted() -> None:
    evidence = detect("f", [PAIR] * 39 + [{"prompt": "a", "chosen": "b", "model": "m"}])
    assert evidence == FormatEvidence(
        path="f",
        format="pairs",
        decided_by="columns",
        evidence=[
            "39 of 40 sampled rows have chosen and rejected",
            "40 of 40 sampled rows have a prompt",
            "0 of 40 sampled rows hold lists of messages on both sides",
            "1 of 40 sampled rows do not have this structure",
        ],
        columns={"chosen": 40, "model": 1, "prompt": 40, "rejected": 39},
        unused_columns=["model"],
        kind="pairs",
    )
    assert json.dumps(evidence.as_json())
    told = detect("f", load("hh")).evidence
    assert told[:2] == [
        "4 of 4 sampled rows have chosen and rejected",
        "4 of 4 sampled rows have two texts that start with a Human or Assistant marker",
    ]
    assert detect("f", load("nectar")).evidence == ["4 of 4 sampled rows have prompt and answers"]


def test_the_more_specific_format_wins() -> None:
    assert detect("f", load("ultrafeedback_binarized")).format == "ultrafeedback_binarized"
    # Its messages without the columns of that data set are pairs.
    rows = [
        {key: row[key] for key in ("chosen", "rejected", "score_chosen")} for row in load("ultrafeedback_binarized")
    ]
    assert detect("f", rows).format == "pairs"
    for name in ("nectar", "helpsteer2_preference", "rewardbench2"):
        assert detect("f", load(name), EVERY_KIND).format == name
    refined = set(chain.from_iterable(known.refines for known in FORMATS.values()))
    assert refined <= FORMATS.keys()


def test_no_row_of_another_data_set_fits() -> None:
    """Each fixture's rows fit one format of pairs, and those that it refines."""
    for name in ("trl_standard", "hh", "ultrafeedback", "summarize", "webgpt", "shp", "safe_rlhf", "nectar"):
        fitting = {
            known.name for known in FORMATS.values() if known.kind == "pairs" and all(map(known.fits, load(name)))
        }
        assert fitting == {"pairs" if name == "trl_standard" else name}


def test_a_file_that_fits_several_formats_is_an_error_with_the_choices() -> None:
    message = (
        r"^f: the format is ambiguous: pairs \(1 of 1 .*hh \(1 of 1 .*Write format: pairs .* or format: hh .* beside"
    )
    with pytest.raises(DataError, match=message):
        detect("f", [{**HH, "prompt": "a"}])
    assert detect("f", [{**HH, "prompt": "a"}], wanted="hh").format == "hh"
    # A prompt that ends where the answer goes leaves no doubt.
    assert detect("f", [{"prompt": "\n\nHuman: a\n\nAssistant: ", "chosen": "b", "rejected": "c"}]).format == "hh"


def test_a_file_that_mixes_formats_is_an_error_or_is_told() -> None:
    message = (
        r"ambiguous: of 10 sampled rows, pairs fits 6, hh fits 4; columns found: chosen, prompt, rejected\. .*split it"
    )
    with pytest.raises(DataError, match=message):
        detect("f", [PAIR] * 6 + [HH] * 4)
    evidence = detect("f", [PAIR] * 19 + [JUDGED]).evidence
    assert evidence[-2:] == [
        "1 of 20 sampled rows do not have this structure",
        "1 of these have that of feedback: the file may mix formats",
    ]
    named = detect("f", [PAIR] * 6 + [HH] * 4, wanted="pairs")
    assert (named.format, named.decided_by, named.evidence[0]) == ("pairs", "config", "named in the config")
    assert named.evidence[-1] == "4 of these have that of hh: the file may mix formats"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": "The sky is blue", "rejected": "The sky is black"},
            "no prompt can be told: .*never cut.*add a prompt",
        ),
        (
            {"completion": "a", "label": True},
            r"Known: pairs \(.*; columns found: completion, label\.",
        ),
        (
            {"history": "a", "human_ref_A": "b", "labels": 1},
            r"Nearest: shp lacks human_ref_B; columns found: history",
        ),
        (
            {"prompt": "a", "chosen": 3, "rejected": 4},
            r"Nearest: pairs has other types \(prompt, .*\)",
        ),
        ({"chosen_ids": [1, 2], "rejected_ids": [1, 3]}, "the rows hold token ids, not texts"),
        ({"question": "a", "answer_0": "b", "answer_1": "c"}, r"Nearest: webgpt lacks score_0, score_1; "),
    ],
)
def test_an_unknown_layout_names_the_nearest_formats_and_the_columns(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^f: .*{message}"):
        detect("f", [row] * 3)


def test_rows_of_another_kind_are_shown_their_place() -> None:
    with pytest.raises(
        DataError, match=r"^f: the rows are of format feedback \(.*\), which belongs in data\.feedback;"
    ):
        detect("f", [JUDGED] * 5)
    with pytest.raises(DataError, match=r"of format pairs \(.*\), which belongs in data\.preferences"):
        detect("f", [PAIR] * 5, ("feedback",))
    with pytest.raises(
        DataError, match=r"of format prompts \(.*\), which belongs in data\.rl_prompts or data\.eval_pro"
    ):
        detect("f", [{"prompt": "a", "answer": 4}] * 5)
    steps = {"prompt": "a", "completions": ["b"], "labels": [True]}
    with pytest.raises(DataError, match=r"of format stepwise \(.*\), which belongs in `tidegate check FILE`"):
        detect("f", [steps] * 5)
    assert detect("f", [steps] * 5, EVERY_KIND).kind == "stepwise"
    assert detect("f", [JUDGED] * 5, EVERY_KIND).kind == "feedback"
    assert detect("f", [PAIR] * 5, EVERY_KIND).kind == "pairs"


def test_a_named_format_must_be_one_of_the_kind() -> None:
    with pytest.raises(ConfigurationError, match=r"^f: format feedback is unknown here; allowed: auto, pairs, hh, "):
        detect("f", [PAIR], wanted="feedback")
    with pytest.raises(ConfigurationError, match=r"^data\.x: f: format nothing is unknown here"):
        detect("f", [PAIR], wanted="nothing", where="data.x: f")
    check_options("f", FORMATS["ultrafeedback"], {"score": "honesty"})
    check_options("f", FORMATS["pairs"], {"max_pairs_per_row": 6})


def test_no_row_no_format() -> None:
    with pytest.raises(DataError, match=r"^f: no row could be read, so its format is unknown$"):
        detect("f", [])


def test_names_of_columns_are_told_where_they_are_names_and_values_never() -> None:
    row = {f"column {index:02}": "hidden" for index in range(100)} | {"a\nline": "hidden", "b" * 1000: "hidden"}
    with pytest.raises(DataError) as caught:
        detect("f", [row])
    assert "columns found: column 00, column 01" in str(caught.value)
    assert "bbb" not in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert len(detect("f", [{**PAIR, **row}]).columns) == 50


def bad(number: int, raw: str, detail: str) -> RawRow:
    return RawRow("f", number, raw, None, Finding(Reason.MALFORMED_JSON, detail))


@pytest.mark.parametrize(
    ("rows", "is_whole", "message"),
    [
        ([], True, "f holds no rows"),
        (
            [bad(1, "{", "why")],
            True,
            r"f: its only row could not be read; row 1: why\. .*one JSON text over many lines",
        ),
        (
            [bad(3, "x", "why")] * 2,
            True,
            r"f: none of its 2 rows could be read; row 3: why\. Write one JSON object a line",
        ),
        ([bad(1, "x", "why")] * 2, False, r"f: none of its first 2 rows could be read"),
        ([bad(1, '[{"a": 1}]', "why")], True, r"Name the file \.json"),
    ],
)
def test_a_file_without_any_readable_row_says_why(rows: list[RawRow], is_whole: bool, message: str) -> None:
    with pytest.raises(DataError, match=message):
        refuse_unreadable("f", rows, is_whole)
    refuse_unreadable("f", [*rows, RawRow("f", 9, "", {"a": 1})], is_whole)


def test_the_first_rows_of_a_file_decide(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({**PAIR, "prompt": str(index)}) for index in range(SAMPLE_ROWS)]
    path.write_text("\n".join([*lines, *(json.dumps(HH) for _ in range(SAMPLE_ROWS))]) + "\n")
    evidence = identify("rows", path, "data.x: rows", ("pairs",))
    assert (evidence.format, evidence.path) == ("pairs", "rows")
    assert evidence.columns == dict.fromkeys(("chosen", "prompt", "rejected"), SAMPLE_ROWS)
    assert identify("rows", path, "data.x: rows", ("pairs",), "hh").decided_by == "config"
    path.write_text("oops\n" * (SAMPLE_ROWS + 1))
    with pytest.raises(DataError, match=rf"^data\.x: rows: none of its first {SAMPLE_ROWS} rows could be read"):
        identify("rows", path, "data.x: rows", ("pairs",))


@pytest.mark.parametrize("name", ["shp.jsonl", "rlhflow.parquet", "llama_factory_alpaca.json", "rewardbench.csv"])
def test_files_of_each_kind_are_told_as_they_are_read(name: str) -> None:
    from pair_fixtures import FOLDER

    expected = {"rlhflow": "pairs", "rewardbench": "pairs"}
    evidence = identify(name, FOLDER / f"pairs_{name}", name, ("pairs",))
    stem = name.split(".")[0]
    assert evidence.format == expected.get(stem, stem)
