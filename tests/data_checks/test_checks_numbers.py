"""The metric stage: each number on features whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feature_rows import checked, good_columns, keys, random_columns, write_features

from data_checks.checks import DuckDbEngine, Measured, measure
from data_checks.checks.histograms import Spread, rounded
from data_checks.checks.measure import SCORE_RANGES, binomial_p_value
from data_checks.checks.metrics_sql import METRICS, PREFIXES, metrics_of, select
from data_checks.checks.tables import kept_columns, kept_sample, long_table
from data_checks.config import CheckDataConfig
from data_checks.features.flags import Flag
from data_checks.table_files import FINAL_FEATURES

CONFIG = CheckDataConfig.model_validate({"preferences": [{"path": "p.jsonl"}]})
Numbers = Callable[..., Measured]


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    """Measure columns; keywords are those of `checked`."""

    def run(
        columns: dict[str, Any], table: str = "preferences", config: CheckDataConfig = CONFIG, **more: Any
    ) -> Measured:
        path = write_features(tmp_path / f"{table}.parquet", columns)
        with DuckDbEngine(num_threads=1) as engine:
            return measure(checked({table: path}, **more), config, engine)

    return run


def with_flag(bit: Flag, part: str, rows: int, num_rows: int = 40, table: str = "preferences") -> dict[str, Any]:
    columns = good_columns(num_rows, table)
    columns[f"{part}_flags"] = [int(bit) if index < rows else 0 for index in range(num_rows)]
    return columns


FLAGS = [
    (Flag.MOJIBAKE, "mojibake_fraction"),
    (Flag.CONTROL, "control_fraction"),
    (Flag.INVISIBLE, "invisible_fraction"),
    (Flag.MARKER, "marker_fraction"),
    (Flag.EMAIL, "email_fraction"),
    (Flag.PHONE, "phone_fraction"),
    (Flag.IDENTITY_NUMBER, "identity_number_fraction"),
    (Flag.IP_ADDRESS, "ip_address_fraction"),
]


@pytest.mark.parametrize(("bit", "name"), FLAGS, ids=[name for _, name in FLAGS])
@pytest.mark.parametrize("part", ["prompt", "chosen", "rejected"])
def test_a_flag_in_any_text_counts_the_row(bit: Flag, name: str, part: str, numbers: Numbers) -> None:
    found = numbers(with_flag(bit, part, 3)).numbers
    assert found[name] == 3 / 40
    assert found["pii_fraction"] == (3 / 40 if name.split("_")[0] in ("email", "phone", "identity", "ip") else 0)
    others = {other for _, other in FLAGS} - {name}
    assert {found[other] for other in others} == {0}


def test_secrets_are_counted_in_all_rows_and_in_kept_ones(numbers: Numbers) -> None:
    columns = with_flag(Flag.SECRET, "prompt", 5)
    columns["fate"][:3] = ["quarantined"] * 3
    columns["reason"] = ["secret"] * 3 + [None] * 37
    columns["split"] = [None] * 3 + list(columns["split"][3:])
    found = numbers(columns).numbers
    assert (found["secret_rows"], found["secret_rows_kept"]) == (5, 2)
    assert found["rows_unaccounted"] == 0


@pytest.mark.parametrize(("bit", "name"), [(Flag.TRUNCATED, "truncated"), (Flag.REFUSAL, "refusal")])
def test_a_gap_has_a_sign_and_says_how_often_one_side_alone_is_concerned(
    bit: Flag, name: str, numbers: Numbers
) -> None:
    columns = with_flag(bit, "chosen", 6)
    columns["rejected_flags"] = [int(bit) if 4 <= index < 8 else 0 for index in range(40)]
    found = numbers(columns).numbers
    assert (found[f"chosen_{name}_fraction"], found[f"rejected_{name}_fraction"]) == (6 / 40, 4 / 40)
    assert (found[f"{name}_gap"], found[f"{name}_one_side_fraction"]) == (2 / 40, 6 / 40)
    assert found[f"{name}_fraction"] == 10 / 80


def test_the_longer_answer_counts_one_equal_ones_half_and_ties_not(numbers: Numbers) -> None:
    columns = good_columns(8)
    columns["chosen_tokens"], columns["rejected_tokens"] = [5, 5, 5, 3, 3, 9, 9, 9], [4, 4, 5, 3, 4, 1, 1, 1]
    columns["is_tie"] = [False] * 5 + [True] * 3
    columns["margin"] = [None] * 5 + [0.0] * 3
    measured = numbers(columns)
    assert measured.numbers["chosen_longer_share"] == (2 + 2 / 2) / 5
    assert measured.support["chosen_longer_share"] == 5
    assert measured.numbers["tie_fraction"] == 3 / 8
    without = {**columns, "chosen_tokens": [None] * 8, "rejected_tokens": [None] * 8}
    assert numbers(without, limits=None).numbers["chosen_longer_share"] == 4 / 5  # by characters


def test_repeats_and_contradictions_among_kept_pairs(numbers: Numbers) -> None:
    columns = good_columns(10)
    same = {0: 9, 1: 9, 2: 9, 3: 9}
    columns["prompt_key"] = keys(columns["example"]).tolist()
    for row in same:
        columns["prompt_key"][row] = 1
    columns["chosen_key"], columns["rejected_key"] = list(range(20, 30)), list(range(40, 50))
    columns["chosen_key"][:4], columns["rejected_key"][:4] = [7, 7, 8, 7], [8, 8, 7, 7]
    found = numbers(columns).numbers
    assert (found["duplicate_rows_kept"], found["conflicting_rows_kept"]) == (1, 3)
    columns["is_tie"] = [False, False, True, False] + [False] * 6
    assert numbers(columns).numbers["conflicting_rows_kept"] == 0


def test_repeats_and_contradictions_among_feedback(numbers: Numbers) -> None:
    columns = good_columns(6, "feedback")
    columns["prompt_key"], columns["chosen_key"] = [1, 1, 1, 2, 3, 3], [5, 5, 5, 5, 6, 6]
    columns["label"], columns["rating"] = [True, True, False, True, None, None], [None, None, None, None, 1.0, 2.0]
    found = numbers(columns, "feedback").numbers
    assert (found["feedback_duplicate_rows_kept"], found["feedback_conflicting_rows_kept"]) == (1, 3)
    assert (found["feedback_num_labelled"], found["feedback_num_rated"]) == (4, 2)
    assert found["feedback_good_share"] == 3 / 4


def test_prompts_on_both_sides_and_largest_group(tmp_path: Path) -> None:
    pairs, feedback = good_columns(20), good_columns(20, "feedback")
    # Half of the feedback asks the pairs' questions, some from the other side; one prompt has 5 rows.
    feedback["split"] = ["validation"] * 20
    feedback["group_key"] = [
        *pairs["group_key"][:4].tolist(),
        *([77] * 5),
        *keys(1000 + feedback["example"][9:]).tolist(),
    ]
    feedback["cluster_key"] = feedback["group_key"]
    paths = {
        "preferences": write_features(tmp_path / "p.parquet", pairs),
        "feedback": write_features(tmp_path / "f.parquet", feedback),
    }
    with DuckDbEngine(num_threads=1) as engine:
        found = measure(checked(paths), CONFIG, engine).numbers
    assert found["prompts_on_both_sides"] == 3  # row 0 of the pairs is on the validation side itself
    assert found["evaluation_prompts_trained_on"] == 3
    assert found["feedback_largest_prompt_share"] == 4 / 20
    assert (found["largest_prompt_share"], found["num_prompts"]) == (0, 20)
    assert found["num_eval_groups"] == 2 + 3 + 1 + 11


def test_evaluation_prompts_come_from_their_file_where_there_is_one(tmp_path: Path) -> None:
    pairs, evaluation = good_columns(20), good_columns(5, "eval_prompts")
    evaluation["group_key"] = [*pairs["group_key"][:2].tolist(), 5, 6, 7]
    evaluation["cluster_key"] = [*pairs["cluster_key"][:3].tolist(), 6, 7]
    paths = {
        "preferences": write_features(tmp_path / "p.parquet", pairs),
        "eval_prompts": write_features(tmp_path / "e.parquet", evaluation),
    }
    with DuckDbEngine(num_threads=1) as engine:
        found = measure(checked(paths), CONFIG, engine).numbers
    assert found["evaluation_prompts_trained_on"] == 1
    assert found["evaluation_clusters_trained_on"] == 2
    assert found["num_eval_groups"] == 5


def test_near_duplicates_on_both_sides(numbers: Numbers) -> None:
    columns = good_columns(20)
    columns["cluster_key"] = columns["cluster_key"].tolist()
    columns["cluster_key"][0] = columns["cluster_key"][1]
    found = numbers(columns).numbers
    assert (found["near_duplicates_across_splits"], found["prompts_on_both_sides"]) == (2 / 20, 0)
    measured = numbers({**columns, "cluster_key": [None] * 20})
    assert measured.numbers["near_duplicates_across_splits"] is None
    assert "near_duplicates is null" in measured.skipped["near_duplicates_across_splits"]


def test_sides_over_the_limit(numbers: Numbers) -> None:
    columns = good_columns(10)
    columns["chosen_tokens"] = [2000] * 3 + [10] * 7
    columns["rejected_tokens"] = [2000] + [10] * 9
    found = numbers(columns).numbers
    assert (found["over_long_gap"], found["over_long_one_side_fraction"]) == (2 / 10, 2 / 10)
    measured = numbers(columns, limits=None)
    assert measured.skipped["over_long_gap"] == measured.skipped["too_long_fraction"] == "no tokenizer was given"


def test_scores_outside_the_range_of_their_format(numbers: Numbers) -> None:
    columns = good_columns(10)
    columns["chosen_score"], columns["rejected_score"] = [1.0] * 8 + [5.0, 2.0], [-1.0] * 9 + [3.0]
    formats = [SimpleNamespace(path="rows.jsonl", format="webgpt")]
    found = numbers(columns, formats=formats).numbers
    assert found["score_out_of_range"] == 3
    assert found["score_inverted_fraction"] == 1 / 10
    measured = numbers(columns)
    assert measured.numbers["score_out_of_range"] is None
    assert "range" in measured.skipped["score_out_of_range"]


def test_ranges_are_of_formats_and_columns_that_exist() -> None:
    named = {name for kind in ("PairFormat", "FeedbackFormat") for name in formats_of(kind)}
    assert set(SCORE_RANGES) <= named
    assert {column for ranges in SCORE_RANGES.values() for column in ranges} <= set(FINAL_FEATURES.names)


def formats_of(kind: str) -> tuple[str, ...]:
    from typing import get_args

    from data_checks import config

    return get_args(getattr(config, kind))


def test_order_of_answers(numbers: Numbers) -> None:
    columns = good_columns(1000)
    measured = numbers(columns)
    assert measured.numbers["first_position_share"] == 0.5
    assert measured.numbers["position_p_value"] == 1.0
    assert measured.numbers["annotator_position_p_value"] is None
    columns["chosen_position"] = [1] * 600 + [2] * 400
    # One of two people always chooses the first answer.
    columns["annotator"] = ["a"] * 100 + ["b"] * 900
    found = numbers(columns).numbers
    assert found["position_p_value"] == pytest.approx(3e-10, rel=0.2)
    assert found["annotator_position_p_value"] == pytest.approx(2 * math.erfc(49.5 / 5 / math.sqrt(2)))
    unknown = numbers({**columns, "chosen_position": [None] * 1000})
    assert unknown.numbers["position_p_value"] is None
    assert "order" in unknown.skipped["position_p_value"]
    assert binomial_p_value(0, 0) == 1.0


def test_defects_come_from_the_account_whatever_a_row_is_counted_under(numbers: Numbers) -> None:
    defects = {"preferences": {"prompt_mismatch": 5, "malformed_json": 1, "row_too_large": 1, "template_failed": 4}}
    found = numbers(good_columns(100), defects=defects).numbers
    assert found["prompt_mismatch_fraction"] == 5 / 100
    assert found["malformed_fraction"] == 2 / 100
    assert found["template_failed_fraction"] == 4 / 100
    assert found["identical_fraction"] == 0


def test_whatever_does_not_add_up_is_counted(numbers: Numbers) -> None:
    columns = good_columns(20)
    assert numbers(columns).numbers["rows_unaccounted"] == 0
    columns["reason"] = ["secret"] + [None] * 19
    assert numbers(columns).numbers["rows_unaccounted"] == 1
    columns["fate"][0], columns["reason"] = "quarantined", [None] * 20
    columns["split"] = [None, *list(columns["split"])[1:]]
    assert numbers(columns).numbers["rows_unaccounted"] == 1


def test_an_rl_prompt_on_the_validation_side_is_no_defect_of_its_file(tmp_path: Path) -> None:
    columns = good_columns(20, "rl_prompts")
    columns["fate"][:2], columns["reason"] = ["quarantined"] * 2, ["prompt_in_evaluation"] * 2 + [None] * 18
    data = checked({"rl_prompts": write_features(tmp_path / "r.parquet", columns)})
    data.ledgers["rl_prompts"].quarantined = {"prompt_in_evaluation": 2}
    named = CONFIG.model_copy(update={"eval_prompts": "e.jsonl"})
    with DuckDbEngine(num_threads=1) as engine:
        fractions = [
            measure(data, config, engine).numbers["rl_prompts_quarantined_fraction"] for config in (CONFIG, named)
        ]
    assert fractions == [0, 2 / 20]


def test_numbers_by_source(numbers: Numbers) -> None:
    columns = good_columns(40)
    columns["chosen_tokens"] = [9 if source == "source_1" else 1 for source in columns["source"]]
    columns["rejected_tokens"] = [5] * 40
    measured = numbers(columns)
    shares = {e["source"]: e["value"] for e in measured.by_source if e["metric"] == "chosen_longer_share"}
    assert shares == {"source_0": 0.0, "source_1": 1.0}
    assert measured.sources["preferences"] == [
        {"source": "source_0", "num_rows": 20},
        {"source": "source_1", "num_rows": 20},
    ]
    names = {metric.name for metric in metrics_of("preferences", by_source=True)}
    assert {entry["metric"] for entry in measured.by_source} == names


def test_lengths_and_histograms(numbers: Numbers) -> None:
    columns = good_columns(1000)
    columns["prompt_characters"] = list(range(1000))
    columns["margin"] = [index / 1000 for index in range(1000)]
    measured = numbers(columns)
    lengths = measured.lengths["prompt_characters"]
    assert lengths == {"mean": 499.5, "p50": 499.0, "p95": 949.0, "p99": 989.0, "max": 999.0}
    histogram = measured.histograms["prompt_characters"]
    assert (histogram["start"], histogram["width"], sum(histogram["counts"])) == (0, 50, 1000)
    margins = measured.histograms["margin"]
    assert (len(margins["counts"]), sum(margins["counts"]), margins["start"]) == (30, 1000, 0.0)
    assert max(margins["counts"]) - min(margins["counts"]) <= 1
    assert "chosen_score" not in measured.histograms


def test_long_texts_keep_three_digits() -> None:
    with DuckDbEngine(num_threads=1) as engine:
        sql = "select " + ", ".join(rounded(str(value)) for value in (7, 999, 1234, 98765, 123456789, 12345678901))
        (row,) = engine.query(sql, {})
    assert list(row.values()) == [7, 999, 1230, 98700, 123000000, 12340000000]
    assert Spread([1.0, 2.0], [99, 1], 101.0).percentile(99) == 1.0


@pytest.mark.parametrize("table", PREFIXES)
def test_every_statement_runs_on_the_features_that_the_runner_writes(table: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(FINAL_FEATURES.empty_table(), path)
    with DuckDbEngine(num_threads=1) as engine:
        measured = measure(checked({table: path}), CONFIG, engine)
        sample = kept_sample(engine, table, {table: [path]})
    assert sample.column_names == list(kept_columns(table))
    # Of no rows there are counts, and no fraction is a number.
    for name, value in measured.numbers.items():
        if value is None:
            assert measured.skipped[name]
        elif name != "near_duplicate_prompts_fraction":
            assert value in (0, 5), name


def test_metric_names_are_unique_within_a_kind() -> None:
    for table in PREFIXES:
        names = [metric.name for metric in METRICS if table in metric.tables]
        assert len(names) == len(set(names))
        assert set(select(table, metrics_of(table)).columns) == set(names)


def test_the_sample_is_stratified_and_does_not_depend_on_order(tmp_path: Path) -> None:
    columns = good_columns(5000)
    columns["source"] = ["small" if index < 100 else "large" for index in range(5000)]
    backwards = {name: list(values)[::-1] for name, values in columns.items()}
    paths = [write_features(tmp_path / f"{i}.parquet", c) for i, c in enumerate((columns, backwards))]
    with DuckDbEngine(num_threads=2) as engine:
        first, second = (kept_sample(engine, "preferences", {"preferences": [path]}, 1000) for path in paths)
        everything = kept_sample(engine, "preferences", {"preferences": paths[:1]})
    assert first.equals(second)
    small = sum(example < 100 for example in first["example"].to_pylist())
    assert small == 100
    assert 450 < first.num_rows - small < 650
    assert everything.num_rows == 5000


def test_a_small_source_is_allowed_more_chance(numbers: Numbers) -> None:
    from data_checks.checks.suite_files import checks_of

    columns = good_columns(2040)
    columns["source"] = ["small" if index < 40 else "large" for index in range(2040)]
    columns["chosen_tokens"] = [9 if index % 20 < 13 else 1 for index in range(2040)]
    columns["rejected_tokens"] = [5] * 2040
    info = checks_of("sources")["chosen_longer_share_by_source"]
    table = {row["source"]: row for row in long_table(numbers(columns), [info], CONFIG)}
    assert {row["value"] for row in table.values()} == {0.65}
    assert table["small"]["bound"] == 0.6
    assert table["large"]["bound"] == pytest.approx(0.65 - 3.29 * math.sqrt(0.24 / 2000))


def test_memory_is_bounded_and_what_does_not_fit_goes_to_disk(tmp_path: Path) -> None:
    path = write_features(tmp_path / "p.parquet", random_columns(200_000, 3))
    data = checked({"preferences": path})
    small = DuckDbEngine(tmp_path / "spill", memory_bytes=40 << 20, num_threads=1)
    with small, DuckDbEngine(num_threads=1) as large:
        assert measure(data, CONFIG, small) == measure(data, CONFIG, large)


def test_a_view_can_be_many_files(tmp_path: Path) -> None:
    columns = good_columns(10)
    paths = [write_features(tmp_path / f"{part}.parquet", columns) for part in range(3)]
    with DuckDbEngine(num_threads=1) as engine:
        assert engine.query("select count(*) as n from preferences", {"preferences": paths}) == [{"n": 30}]
        assert engine.query("select count(*) as n from preferences", {"preferences": paths[:1]}) == [{"n": 10}]
        assert isinstance(engine.table("select 1 as a", {}), pa.Table)
