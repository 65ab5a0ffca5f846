"""What a check found: for people, for later stages, and as the message of a refusal. No row text anywhere."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data_checks.config import CheckDataConfig
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
WORST_REASONS = 3
WITHOUT_PAIRS = ("num_train_pairs", "num_validation_pairs", "num_rl_prompts")
"""Numbers that are 0 because no pair is left: what to do about that is said once."""


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

    tables = {"dataset_metrics": pd.DataFrame([metrics]), "kept_pairs": row_metrics(data).to_pandas()}
    parameters = suite_parameters(data, config)
    checks: list[Check] = []
    results = {}
    for name in SUITES:
        found, results[name] = run_suite(load_suite(name), tables[name], parameters)
        checks += found
    return sorted(checks, key=lambda check: -VERDICTS.index(check.verdict)), results


def summarise(data: CheckedData, checks: list[Check], metrics: DatasetMetrics) -> dict[str, Any]:
    """Return the stage's summary (docs/stages.md)."""
    counts = data.counts["preferences"]
    return {
        "rows": counts.rows,
        "kept": counts.kept,
        "quarantined": counts.quarantined,
        "num_train_pairs": len(data.train),
        "num_validation_pairs": len(data.validation),
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
    shown = [check for check in failures if data.pairs or check.name not in WITHOUT_PAIRS]
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
