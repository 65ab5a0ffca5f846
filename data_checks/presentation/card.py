"""A dataset card in Markdown: what the data are, what was left out and why, what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_checks.presentation.words import ORDER, account, show_number, show_threshold, what_to_say


def dataset_card(report: Mapping[str, Any]) -> str:
    """Return the card of a checked data set.

    Args:
        report: what report.json holds.
    """
    lines = [
        "# Data card",
        "",
        f"Fingerprint `{report['fingerprint']}` (does not depend on row order or files). Verdict: {report['verdict']}.",
        "",
        "## Files",
        "",
        "| file | format | evidence |",
        "|---|---|---|",
    ]
    for evidence in report["formats"]:
        cells = (evidence["path"], evidence["format"], "; ".join(evidence["evidence"]))
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    lines += ["", "## Account", "", f"{report['rows']:,} rows, {report['examples']:,} examples.", ""]
    lines += ["| fate | reason | examples |", "|---|---|---|"]
    lines += [f"| {fate} | {reason or '-'} | {number:,} |" for fate, reason, number in account(report)]
    if report["num_rows"]:
        lines += ["", "## Tables", "", "| table | rows |", "|---|---|"]
        lines += [f"| {name} | {number:,} |" for name, number in report["num_rows"].items()]
    lines += ["", "## Checks", "", "| verdict | check | value | limit | what to do |", "|---|---|---|---|---|"]
    for check in sorted(report["checks"], key=lambda check: ORDER.index(check["verdict"])):
        value = (
            f"{show_number(check['value'], check['unit'])}{'' if check['unit'] == 'fraction' else ' ' + check['unit']}"
        )
        told = (check["verdict"], check["name"], value, show_threshold(check), what_to_say(check))
        lines.append(f"| {' | '.join(_cell(cell) for cell in told)} |")
    lines += _baselines(report.get("baselines") or {})
    return "\n".join(lines) + "\n"


def _baselines(baselines: Mapping[str, Any]) -> list[str]:
    """Return what a reward model has to beat, one line a rule that needs no learning."""
    found = {split: rules for split, rules in baselines.items() if isinstance(rules, Mapping)}
    if not found:
        return []
    lines = ["", "## What a reward model has to beat", "", "| split | rule | accuracy | pairs |", "|---|---|---|---|"]
    for split, rules in found.items():
        for name, rule in rules.items():
            if isinstance(rule, Mapping) and "accuracy" in rule:
                accuracy = show_number(rule["accuracy"], "fraction")
                lines.append(f"| {split} | {name} | {accuracy} | {rule.get('n', '-')} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
