"""What a check found: for people, for later stages, and as the message of a refusal. No row text anywhere."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data_checks.config import CheckDataConfig
from data_checks.feedback_metrics import feedback_metrics, feedback_report, feedback_row_metrics
from data_checks.keys import group_id
from data_checks.metrics import (
    DatasetMetrics,
    length_statistics,
    longest_prompt,
    row_metrics,
    sources,
    suite_parameters,
)
from data_checks.rows import ADVICE, Reason
from data_checks.runner import CheckedData, TableCounts
from data_checks.suites import VERDICTS, Check, load_suite, overall_verdict, run_suite
from data_checks.wording import describe_check

SUITES = ("dataset_metrics", "kept_pairs")
FEEDBACK_SUITES = ("feedback_metrics", "kept_feedback")
"""Run where feedback was read."""
CHECKS_WITHOUT_PAIRS = {
    *("one_row_of_metrics", "rl_prompts_quarantined_fraction", "eval_prompts_quarantined_fraction"),
    *("num_rl_prompts", "num_eval_prompts", "prompts_on_both_sides", "evaluation_prompts_trained_on"),
}
"""Those of `dataset_metrics` that mean something where no pairs were read."""
WORST_REASONS = 3
FOLLOWS = {
    "pairs": {"num_train_pairs", "num_validation_pairs"},
    "feedback": {"num_train_feedback", "num_validation_feedback"},
}
"""Numbers that are 0 because nothing of the kind is left: what to do about that is said once."""


def run_checks(
    data: CheckedData, config: CheckDataConfig, metrics: DatasetMetrics
) -> tuple[list[Check], dict[str, Any]]:
    """Run every suite; return the checks, worst first, and Great Expectations' results by suite.

    Args:
        data: what was checked.
        config: with the thresholds.
        metrics: the `dataset_metrics` of `data`.
    """
    import pandas as pd

    parameters = suite_parameters(data, config)
    checks: list[Check] = []
    results = {}
    suites = [(_dataset_suite(data), pd.DataFrame([metrics]))]
    if "preferences" in data.counts:
        suites.append((load_suite("kept_pairs"), row_metrics(data).to_pandas()))
    if "feedback" in data.counts:
        numbers = feedback_metrics(data)
        suites.append((_feedback_suite(numbers), pd.DataFrame([numbers])))
        suites.append((load_suite("kept_feedback"), feedback_row_metrics(data).to_pandas()))
    for suite, table in suites:
        found, results[suite["name"]] = run_suite(suite, table, parameters)
        checks += found
    return sorted(checks, key=lambda check: -VERDICTS.index(check.verdict)), results


def _dataset_suite(data: CheckedData) -> dict[str, Any]:
    suite = load_suite("dataset_metrics")
    if "preferences" in data.counts:
        return suite
    kept = [item for item in suite["expectations"] if item["meta"]["name"] in CHECKS_WITHOUT_PAIRS]
    return {**suite, "expectations": kept}


def _feedback_suite(numbers: DatasetMetrics) -> dict[str, Any]:
    suite = load_suite("feedback_metrics")
    if numbers["num_labelled_feedback"] or not numbers["feedback_kept"]:
        return suite
    # Ratings alone have no share of good answers, and that is no defect.
    kept = [item for item in suite["expectations"] if item["meta"]["name"] != "feedback_good_share"]
    return {**suite, "expectations": kept}


def summarise(data: CheckedData, checks: list[Check], metrics: DatasetMetrics) -> dict[str, Any]:
    """Return the stage's summary (docs/stages.md)."""
    counts, feedback = data.count_of("preferences"), data.count_of("feedback")
    of_feedback = {
        "num_train_feedback": len(data.train_feedback),
        "num_validation_feedback": len(data.validation_feedback),
        "feedback_rows": feedback.rows,
        "feedback_kept": feedback.kept,
        "feedback_quarantined": feedback.quarantined,
    }
    return {
        "rows": counts.rows,
        "kept": counts.kept,
        "quarantined": counts.quarantined,
        "num_train_pairs": len(data.train),
        "num_validation_pairs": len(data.validation),
        **(of_feedback if "feedback" in data.counts else {}),
        "num_rl_prompts": len(data.rl_prompts),
        "num_eval_prompts": len(data.eval_prompts),
        "num_eval_groups": len({group_id(item.prompt) for item in data.eval_prompts}),
        "longest_rl_prompt_tokens": longest_prompt(data.rl_prompts),
        "longest_eval_prompt_tokens": longest_prompt(data.eval_prompts),
        "chosen_longer_share": metrics["chosen_longer_share"],
        "fingerprint": data.fingerprint,
        "verdict": overall_verdict(checks),
        "checks": [check.brief() for check in checks],
    }


def build_report(data: CheckedData, checks: list[Check], metrics: DatasetMetrics) -> dict[str, Any]:
    """Return report.json: the summary with evidence, advice and examples (file:row, never text)."""
    return {
        "schema_version": 1,
        **summarise(data, checks, metrics),
        "checks": [check.as_json() for check in checks],
        "formats": [evidence.as_json() for evidence in data.formats],
        "tables": {name: _table_report(counts) for name, counts in data.counts.items()},
        "limits": asdict(data.limits),
        "lengths": length_statistics(data.pairs),
        "sources": sources(data.pairs),
        "metrics": metrics,
        **({"feedback": {**feedback_report(data), "metrics": feedback_metrics(data)}} if data.feedback else {}),
    }


def _table_report(counts: TableCounts) -> dict[str, Any]:
    defects = {name: {**asdict(found), "advice": ADVICE[Reason(name)]} for name, found in counts.defects.items()}
    return {"rows": counts.rows, "kept": counts.kept, "quarantined": counts.quarantined, "defects": defects}


def refusal(data: CheckedData, checks: list[Check], where: str) -> str | None:
    """Return the message of a check that did not pass, or None when it passed or only warned.

    Args:
        data: what was checked.
        checks: all checks.
        where: the folder that holds the quarantine and the report.
    """
    errors = [check for check in checks if check.verdict == "error"]
    failures = [check for check in checks if check.verdict == "fail"]
    if not errors and not failures:
        return None
    lines = ["the data is not fit for training:"]
    lines += [f"- {check.name} could not be evaluated: {check.error}" for check in errors]
    # Two suites may look at one number: it is said once.
    follow = (set() if data.pairs else FOLLOWS["pairs"]) | (set() if data.feedback else FOLLOWS["feedback"])
    if not data.pairs and not data.feedback:
        follow = follow | {"num_rl_prompts"}
    shown = [check for check in failures if check.name not in follow]
    lines += [f"- {describe_check(check, data)}: {check.advice}" for check in _distinct(shown)]
    for name in data.counts:
        lines += worst_reasons(name, data)
    rows = f"Every such row is in {where}/quarantine.parquet, all" if data.quarantined else "All"
    lines.append(f"{rows} numbers are in {where}/report/report.json")
    return "\n".join(lines)


def worst_reasons(name: str, data: CheckedData) -> list[str]:
    """Return a line for each of the three most frequent reasons, with example rows and what is wrong with the first."""
    counts = data.counts[name]
    worst = sorted(counts.quarantined.items(), key=lambda item: -item[1])[:WORST_REASONS]
    lines = []
    for reason, number in worst:
        examples = counts.defects[reason].examples
        detail = _detail(examples[0], data)
        where = ", ".join([f"{examples[0]} ({detail})", *examples[1:]])
        head = f"- {name}: {number} of {counts.rows} rows ({number / counts.rows:.1%}) {reason}, for example {where}"
        lines.append(f"{head}: {ADVICE[Reason(reason)]}")
    return lines


def _detail(place: str, data: CheckedData) -> str:
    """Return all that was found in a row; what it is counted under may be another of its defects."""
    return next(row.detail for row in data.quarantined if f"{row.file}:{row.number}" == place)


def _distinct(checks: list[Check]) -> list[Check]:
    """Return checks without those that say what an earlier one said: same value, same limits, same advice."""
    seen: dict[tuple[object, ...], Check] = {}
    for check in checks:
        seen.setdefault((check.value, check.limits, check.unit, check.advice), check)
    return list(seen.values())
