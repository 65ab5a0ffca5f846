"""What a check found: for people, for later stages, and as the message of a refusal. No row text anywhere."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from data_checks.checks import Check, describe_check, overall_verdict
from data_checks.result import CheckedData, Ledger, Numbers
from data_checks.rows import ADVICE, Reason

if TYPE_CHECKING:
    from data_checks.samples import SampleAnalysis

SCHEMA_VERSION = 2
WORST_REASONS = 3
FOLLOWS = {
    "pairs": {"num_train_pairs", "num_validation_pairs"},
    "feedback": {"num_train_feedback", "num_validation_feedback"},
}
"""Numbers that are 0 because nothing of the kind is left: what to do about that is said once."""


def summarise(data: CheckedData, checks: list[Check], numbers: Numbers) -> dict[str, Any]:
    """Return the stage's summary (docs/stages.md)."""
    pairs = data.ledger("preferences")
    rows = data.num_rows
    of_feedback: dict[str, Any] = {}
    if "feedback" in data.ledgers:
        feedback = data.ledger("feedback")
        of_feedback = {
            "num_train_feedback": rows["train_feedback"],
            "num_validation_feedback": rows["validation_feedback"],
            "feedback_rows": feedback.rows,
            "feedback_kept": feedback.kept,
            "feedback_quarantined": feedback.quarantined,
            "feedback_dropped": feedback.dropped,
        }
    return {
        "rows": pairs.rows,
        "examples": pairs.examples,
        "kept": pairs.kept,
        "quarantined": pairs.quarantined,
        "dropped": pairs.dropped,
        "num_train_pairs": rows["train_pairs"],
        "num_validation_pairs": rows["validation_pairs"],
        **of_feedback,
        "num_rl_prompts": rows["rl_prompts"],
        "num_eval_prompts": rows["eval_prompts"],
        "num_eval_groups": numbers["num_eval_groups"],
        "longest_rl_prompt_tokens": data.whole.get("longest_rl_prompts_tokens"),
        "longest_eval_prompt_tokens": data.whole.get("longest_eval_prompts_tokens"),
        "chosen_longer_share": numbers.get("chosen_longer_share"),
        "fingerprint": data.fingerprint,
        "verdict": overall_verdict(checks),
        "checks": [check.brief() for check in checks],
    }


def total(data: CheckedData) -> dict[str, Any]:
    """Return the account over all kinds of input: rows, examples, kept, quarantined and dropped."""
    ledgers = list(data.ledgers.values())
    quarantined: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for ledger in ledgers:
        for counts, own in ((quarantined, ledger.quarantined), (dropped, ledger.dropped)):
            for name, number in own.items():
                counts[name] = counts.get(name, 0) + number
    return {
        "rows": sum(ledger.rows for ledger in ledgers),
        "examples": sum(ledger.examples for ledger in ledgers),
        "kept": sum(ledger.kept for ledger in ledgers),
        "quarantined": quarantined,
        "dropped": dropped,
    }


def build_report(
    data: CheckedData, checks: list[Check], numbers: Numbers, details: dict[str, Any], analysis: SampleAnalysis | None
) -> dict[str, Any]:
    """Return report.json (docs/stages.md): the account with evidence, advice and examples (file:row, never text).

    Args:
        data: what was checked.
        checks: worst first.
        numbers: every number of the whole set.
        details: `by_source` and `histograms` of the metric stage.
        analysis: of the sample; None where there was none.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        **total(data),
        "verdict": overall_verdict(checks),
        "fingerprint": data.fingerprint,
        "checks": [check.as_json() for check in checks],
        "formats": [evidence.as_json() for evidence in data.formats],
        "tables": {name: _table_report(ledger) for name, ledger in data.ledgers.items()},
        "num_rows": data.num_rows,
        "limits": None if data.limits is None else asdict(data.limits),
        "metrics": numbers,
        **details,
        "sample": None if analysis is None else asdict(analysis),
        "baselines": None if analysis is None else analysis.baselines,
        "skipped": data.skipped,
    }


def _table_report(ledger: Ledger) -> dict[str, Any]:
    defects = {name: {**asdict(found), "advice": ADVICE[Reason(name)]} for name, found in ledger.defects.items()}
    return {
        "rows": ledger.rows,
        "examples": ledger.examples,
        "kept": ledger.kept,
        "quarantined": ledger.quarantined,
        "dropped": ledger.dropped,
        "defects": defects,
    }


def refusal(data: CheckedData, checks: list[Check], where: str | None) -> str | None:
    """Return the message of a check that did not pass, or None when it passed or only warned.

    Args:
        data: what was checked.
        checks: all checks.
        where: the folder that holds the quarantine and the report; None: nothing was written.
    """
    errors = [check for check in checks if check.verdict == "error"]
    failures = [check for check in checks if check.verdict == "fail"]
    if not errors and not failures:
        return None
    lines = ["the data is not fit for training:"]
    lines += [f"- {check.name} could not be evaluated: {check.error}" for check in errors]
    # Two suites may look at one number: it is said once.
    empty = [
        kind for kind, table in (("pairs", "preferences"), ("feedback", "feedback")) if not data.ledger(table).kept
    ]
    follow = {name for kind in empty for name in FOLLOWS[kind]} | ({"num_rl_prompts"} if len(empty) == 2 else set())
    shown = [check for check in failures if check.name not in follow]
    lines += [f"- {describe_check(check, data)}: {check.advice}" for check in _distinct(shown)]
    for name, ledger in data.ledgers.items():
        lines += worst_reasons(name, ledger)
    if where is not None:
        any_quarantined = any(ledger.num_quarantined for ledger in data.ledgers.values())
        rows = f"Every such row is in {where}/quarantine.parquet, all" if any_quarantined else "All"
        lines.append(f"{rows} numbers are in {where}/report/report.json")
    return "\n".join(lines)


def worst_reasons(name: str, ledger: Ledger) -> list[str]:
    """Return a line for each of the three most frequent reasons, with example rows and what is wrong with the first."""
    lines = []
    for reason, number in sorted(ledger.quarantined.items(), key=lambda item: -item[1])[:WORST_REASONS]:
        found = ledger.defects[reason]
        where = ", ".join([f"{found.examples[0]} ({found.detail})", *found.examples[1:]])
        share = f"{number} of {ledger.examples} rows ({number / ledger.examples:.1%})"
        lines.append(f"- {name}: {share} {reason}, for example {where}: {ADVICE[Reason(reason)]}")
    return lines


def _distinct(checks: list[Check]) -> list[Check]:
    """Return checks without those that say what an earlier one said: same value, same limits, same advice."""
    seen: dict[tuple[object, ...], Check] = {}
    for check in checks:
        seen.setdefault((check.value, check.limits, check.unit, check.advice), check)
    return list(seen.values())
