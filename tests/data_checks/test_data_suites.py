"""Great Expectations fails when it must, errors are not failures, and no text is stored."""

from __future__ import annotations

import json
import re
from typing import Any

import pandas as pd
import pytest

from data_checks.config import CheckDataConfig
from data_checks.metrics import ROW_SCHEMA, dataset_metrics, row_metrics, suite_parameters
from data_checks.report import SUITES, build_report, refusal, run_checks, worst_reasons
from data_checks.rows import ADVICE
from data_checks.suites import Check, completeness_check, exception_message, load_suite, overall_verdict, run_suite
from data_checks.wording import describe_check


@pytest.fixture
def config() -> CheckDataConfig:
    return CheckDataConfig.model_validate({"preferences": [{"path": "p.jsonl"}], "min_pairs": 2})


@pytest.fixture
def data(good_pairs: Any, write_rows: Any, check: Any) -> Any:
    return check(write_rows(good_pairs), validation_fraction=0.3)


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks if check.verdict != "pass"}


def test_good_data_passes_every_expectation(data: Any, config: CheckDataConfig) -> None:
    checks, results = run_checks(data, config, dataset_metrics(data))
    assert verdicts(checks) == {}
    assert overall_verdict(checks) == "pass"
    assert refusal(data, checks, "here") is None
    declared = sum(len(load_suite(name)["expectations"]) for name in SUITES)
    assert len(checks) == declared == sum(results[name]["statistics"]["evaluated_expectations"] for name in SUITES)


def test_suites_name_each_check_once_and_say_what_to_do() -> None:
    for name in SUITES:
        expectations = load_suite(name)["expectations"]
        names = [item["meta"]["name"] for item in expectations]
        assert len(set(names)) == len(names)
        assert all(item["meta"]["advice"] and item["meta"]["unit"] for item in expectations)
        assert all(item["meta"]["measures"] in ("value", "violations", "observed") for item in expectations)
        assert {item["severity"] for item in expectations} <= {"critical", "warning"}


@pytest.mark.parametrize("column", ROW_SCHEMA.names)
def test_a_missing_column_is_an_error_and_the_schema_fails(column: str, data: Any, config: CheckDataConfig) -> None:
    table = row_metrics(data).drop_columns([column]).to_pandas()
    checks, _ = run_suite(load_suite("kept_pairs"), table, suite_parameters(data, config))
    found = verdicts(checks)
    assert found.pop("schema") == "fail"
    assert found[f"{column}_not_null"] == "error"
    assert set(found.values()) == {"error"}
    assert overall_verdict(checks) == "error"


def test_zero_rows_never_pass(data: Any, config: CheckDataConfig) -> None:
    data.train, data.validation, data.rl_prompts, data.eval_prompts = [], [], [], []
    checks, _ = run_suite(load_suite("kept_pairs"), row_metrics(data).to_pandas(), suite_parameters(data, config))
    assert verdicts(checks) == {"row_count": "fail"}
    metrics = pd.DataFrame([dataset_metrics(data)])
    checks, _ = run_suite(load_suite("dataset_metrics"), metrics, suite_parameters(data, config))
    assert verdicts(checks) == {
        "rows_unaccounted": "fail",
        "num_train_pairs": "fail",
        "num_validation_pairs": "fail",
        "num_rl_prompts": "fail",
        "num_eval_prompts": "fail",
        "chosen_longer_share": "warn",
    }


ROW_DEFECTS = [
    ("chosen_characters", 0, "chosen_not_empty"),
    ("rejected_characters", 0, "rejected_not_empty"),
    ("prompt_characters", 0, "prompt_not_empty"),
    ("chosen_last_role", "user", "chosen_ends_with_assistant"),
    ("rejected_last_role", "user", "rejected_ends_with_assistant"),
    ("responses_identical", 1, "responses_differ"),
    ("prompt_tokens", 513, "prompt_within_limit"),
    ("chosen_tokens", 2000, "chosen_within_limit"),
    ("rejected_tokens", 2000, "rejected_within_limit"),
    ("total_tokens", 1025, "total_within_limit"),
    ("example_id", "not a key", "example_id_is_key"),
    ("group_id", None, "group_id_not_null"),
]


@pytest.mark.parametrize(("column", "value", "name"), ROW_DEFECTS)
def test_each_rule_on_rows_fails_alone(column: str, value: Any, name: str, data: Any, config: CheckDataConfig) -> None:
    table = row_metrics(data).to_pandas()
    table.loc[5, column] = value
    parameters = {**suite_parameters(data, config), "max_total_tokens": 1024, "max_response_tokens": 1024}
    checks, _ = run_suite(load_suite("kept_pairs"), table, parameters)
    assert verdicts(checks) == {name: "fail"}
    assert next(check for check in checks if check.name == name).value == 1


METRIC_DEFECTS = [
    ("rows", 0, "fail"),
    ("rows_unaccounted", 1, "fail"),
    ("rows_unaccounted", -1, "fail"),
    ("rows_kept", 1, "fail"),
    ("quarantined_fraction", 0.051, "fail"),
    ("rl_prompts_quarantined_fraction", 0.051, "fail"),
    ("eval_prompts_quarantined_fraction", 0.051, "fail"),
    ("num_train_pairs", 0, "fail"),
    ("num_validation_pairs", 0, "fail"),
    ("num_rl_prompts", 0, "fail"),
    ("num_eval_prompts", 0, "fail"),
    ("prompts_on_both_sides", 1, "fail"),
    ("evaluation_prompts_trained_on", 1, "fail"),
    ("duplicate_rows_kept", 1, "fail"),
    ("conflicting_rows_kept", 1, "fail"),
    ("duplicate_fraction", 0.002, "warn"),
    ("conflicting_fraction", 0.006, "warn"),
    ("too_long_fraction", 0.02, "warn"),
    ("chosen_longer_share", 0.61, "warn"),
    ("chosen_longer_share", None, "warn"),
    ("score_inverted_fraction", 0.002, "warn"),
]


@pytest.mark.parametrize(("column", "value", "verdict"), METRIC_DEFECTS)
def test_each_threshold_is_held(column: str, value: Any, verdict: str, data: Any, config: CheckDataConfig) -> None:
    table = pd.DataFrame([{**dataset_metrics(data), column: value}])
    checks, _ = run_suite(load_suite("dataset_metrics"), table, suite_parameters(data, config))
    assert verdicts(checks) == {column: verdict}
    assert overall_verdict(checks) == verdict


def test_every_metric_has_a_case_or_is_a_count() -> None:
    asserted = {item["kwargs"].get("column") for item in load_suite("dataset_metrics")["expectations"]} - {None}
    assert {column for column, _, _ in METRIC_DEFECTS} == asserted


def test_an_expectation_that_was_not_evaluated_is_an_error(data: Any, config: CheckDataConfig) -> None:
    empty = {"name": "nothing", "expectations": []}
    checks, _ = run_suite(empty, pd.DataFrame({"a": [1]}), suite_parameters(data, config))
    assert overall_verdict(checks) == "error"
    assert [check.name for check in checks] == ["nothing_complete"]
    assert overall_verdict([]) == "error"
    for declared, evaluated, num_results in ((3, 2, 2), (3, 3, 2), (2, 3, 3), (0, 0, 0)):
        incomplete = completeness_check("suite", declared, evaluated, num_results)
        assert incomplete is not None
        assert incomplete.verdict == "error"
    assert completeness_check("suite", 3, 3, 3) is None


def test_both_shapes_of_an_exception_are_errors() -> None:
    flat = {"raised_exception": True, "exception_message": "flat", "exception_traceback": "..."}
    assert exception_message(flat) == "flat"
    assert exception_message({"MetricConfigurationID(...)": {**flat, "exception_message": "nested"}}) == "nested"
    assert exception_message({"raised_exception": False, "exception_message": None}) is None
    assert exception_message({}) is None


def test_results_are_the_same_each_time_and_hold_no_text(write_rows: Any, good_pairs: Any, check: Any) -> None:
    secret = "zanzibar-4711"
    bad = [
        {"prompt": secret, "chosen": " ", "rejected": secret},
        {"prompt": [{"role": secret, "content": secret}], "chosen": "a", "rejected": "b"},
        {"prompt": secret, "chosen": secret, "rejected": secret},
        {"prompt": secret, "chosen": secret, "rejected": 5},
        f'{{"prompt": "{secret}'.encode(),
    ]
    path = write_rows([*[{**row, "prompt": row["prompt"] + secret} for row in good_pairs], *bad])
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path)}], "max_quarantined_fraction": 0.01})
    data = check(path)
    stored = []
    for _ in range(2):
        checks, results = run_checks(data, config, dataset_metrics(data))
        assert overall_verdict(checks) == "fail"
        message = refusal(data, checks, "the folder")
        stored.append(json.dumps([build_report(data, checks, dataset_metrics(data)), results, message]))
    assert stored[0] == stored[1]
    assert secret not in stored[0]
    assert "zanzibar" in str([row.raw for row in data.quarantined])


def test_a_kept_value_that_fails_is_not_stored(data: Any, config: CheckDataConfig) -> None:
    table = row_metrics(data).to_pandas()
    table.loc[3, "example_id"] = "mail@example.org"
    _, stored = run_suite(load_suite("kept_pairs"), table, suite_parameters(data, config))
    assert "example.org" not in json.dumps(stored)
    assert '"unexpected_count": 1' in json.dumps(stored)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("rows_kept", 1, 2, "pairs", (2, None)), "rows_kept is 1 pair, allowed: at least 2 pairs"),
        (("quarantined_fraction", 0.025, 0, "fraction", (None, 0.001)), "(1 of 40), allowed: at most 0.1 %"),
        (
            ("eval_prompts_quarantined_fraction", 0.0, 0, "fraction", (None, 0.05)),
            "is 0 % of the rows of data.eval_prompts, allowed: at most 5 %",
        ),
        (("chosen_longer_share", 0.75, 0, "fraction", (0.4, 0.6)), "75 % of the kept pairs, allowed: 40 % to 60 %"),
        (("rows_unaccounted", 3, 0, "rows", (0, 0)), "is 3 rows, allowed: 0 rows"),
        (("prompt_within_limit", 3, 0, "rows", None), "is 3 rows, allowed: none"),
        (("chosen_longer_share", None, 0, "fraction", (0.4, 0.6)), "chosen_longer_share is not known"),
    ],
)
def test_checks_in_words(data: Any, values: tuple[Any, ...], words: str) -> None:
    name, value, threshold, unit, limits = values
    found = describe_check(Check(name, "critical", value, threshold, unit, "fail", limits=limits), data)
    assert words in found


def test_no_advice_names_a_field_without_its_section() -> None:
    advice = [item["meta"]["advice"] for name in SUITES for item in load_suite(name)["expectations"]]
    for text in [*advice, *ADVICE.values()]:
        for field in CheckDataConfig.model_fields:
            assert not re.search(rf"(?<!data\.)\b{field}\b", text) or "_" not in field, text


def test_refusal_names_the_three_worst_reasons_with_rows(write_rows: Any, good_pairs: Any, check: Any) -> None:
    blank = [{"prompt": f"b{index}", "chosen": " ", "rejected": "x"} for index in range(7)]
    same = [{"prompt": f"s{index}", "chosen": "x", "rejected": "x"} for index in range(3)]
    path = write_rows([*good_pairs, *blank, *same, b"{", b"[]", {"prompt": 1, "chosen": "a", "rejected": "b"}])
    data = check(path)
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path)}], "min_pairs": 2})
    checks, _ = run_checks(data, config, dataset_metrics(data))
    message = refusal(data, checks, "the/folder")
    assert message is not None
    assert "quarantined_fraction is 24.53 % of the preference rows (13 of 53), allowed: at most 5 %" in message
    worst = [line for line in message.splitlines() if line.startswith("- preferences:")]
    assert [line.split(") ")[1].split(",")[0] for line in worst] == [
        "empty_response",
        "identical_responses",
        "malformed_json",
    ]
    assert f"{path}:41 (chosen: turn 1 of the answer is blank after trimming), {path}:42" in worst[0]
    assert "the/folder/quarantine.parquet" in message


def test_an_example_counted_under_another_reason_still_says_what_is_wrong(
    write_rows: Any, good_pairs: Any, check: Any
) -> None:
    both = {"prompt": " ", "chosen": " ", "rejected": "x"}
    data = check(write_rows([*good_pairs, both, {**both, "prompt": "b"}]))
    assert data.counts["preferences"].quarantined == {"empty_prompt": 1, "empty_response": 1}
    line = next(line for line in worst_reasons("preferences", data) if " empty_response, for example" in line)
    assert "pairs.jsonl:41 (turn 1 of the prompt is blank after trimming; also empty_response (chosen: turn 1" in line
