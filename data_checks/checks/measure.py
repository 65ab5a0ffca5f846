"""The metric stage: every number of a data set, by SQL over the final features and from the account of rows."""

from __future__ import annotations

from data_checks.checks import whole_sql
from data_checks.checks.engines import Engine, Rows, Views
from data_checks.checks.histograms import histograms
from data_checks.checks.ledger_numbers import NO_TOKENIZER, add_ledger_numbers
from data_checks.checks.measured import Measured
from data_checks.checks.metrics_sql import PREFIXES, Metric, metrics_of, select
from data_checks.config import CheckDataConfig
from data_checks.naming import shown_names
from data_checks.result import CheckedData

MAX_SOURCES = 200
"""Sources with numbers of their own: those with the most rows."""
NO_NEAR_DUPLICATES = "near-duplicates were not looked for: data.near_duplicates is null"
CONTRADICTIONS = ("kept_with_reason", "quarantined_without_reason")
SCORE_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "webgpt": {"chosen_score": (-1, 1), "rejected_score": (-1, 1), "margin": (0, 2)},
    "helpsteer2": {"rating": (0, 4)},
    "helpsteer2_preference": {"margin": (0, 3)},
    "helpsteer3": {"margin": (0, 3)},
    "ultrafeedback": {"chosen_score": (1, 10), "rejected_score": (1, 10)},
    "ultrafeedback_binarized": {"chosen_score": (0, 10), "rejected_score": (0, 10)},
}
"""Format -> column -> smallest and largest score that its makers give. Other formats declare none."""


def measure(data: CheckedData, config: CheckDataConfig, engine: Engine) -> Measured:
    """Measure a data set.

    Args:
        data: with its final features on disk.
        config: which policies are in force.
        engine: where the statements run.

    Returns:
        All numbers. One that the data cannot give (fractions of no rows, tokens without a tokenizer) is None with its
        reason.
    """
    measured = Measured()
    views: Views = {table: [path] for table, path in data.features.items()}
    tables = [table for table in PREFIXES if table in views]
    add_ledger_numbers(measured, data, config)
    for table in tables:
        _add_counts(measured, table, engine, views)
        _add_sources(measured, table, engine, views)
        _add_repeats(measured, table, engine, views)
        _add_ranges(measured, table, data, engine, views)
    measured.put("num_eval_groups", 0)
    if tables:
        _add_groups(measured, tables, data, engine, views)
    if "preferences" in tables:
        _add_over_long(measured, data, engine, views)
        _add_positions(measured, engine, views)
    _add_unaccounted(measured, data)
    measured.histograms, measured.lengths = histograms(engine, tables, views)
    for name in (
        "train_pairs",
        "validation_pairs",
        "train_feedback",
        "validation_feedback",
        "rl_prompts",
        "eval_prompts",
    ):
        if name in data.num_rows:
            measured.put(f"num_{name}", data.num_rows[name])
    for name, value in data.whole.items():
        if value is not None or name not in measured.numbers:
            measured.put(name, value)
    measured.skipped |= {name: why for name, why in data.skipped.items() if measured.numbers.get(name) is None}
    for name in data.skipped:
        measured.numbers.setdefault(name, None)
    if config.near_duplicates is None and tables:
        # Only depths of one dialogue were looked for: nothing is known of other prompts.
        for name in ("near_duplicates_across_splits", "near_duplicate_prompts_fraction"):
            measured.numbers[name], measured.skipped[name] = None, "data.near_duplicates is null"
    return measured


def _put(measured: Measured, name: str, metric: Metric, row: dict[str, int], columns: tuple[str, str | None]) -> None:
    numerator, denominator = columns
    if denominator is None:
        measured.put(name, row[numerator])
    else:
        measured.put_fraction(name, row[numerator], row[denominator], metric.empty, metric.weight)


def _add_counts(measured: Measured, table: str, engine: Engine, views: Views) -> None:
    metrics = metrics_of(table)
    statement = select(table, metrics)
    (row,) = engine.query(statement.sql, views)
    for metric in metrics:
        _put(measured, PREFIXES[table] + metric.name, metric, row, statement.columns[metric.name])


def _add_sources(measured: Measured, table: str, engine: Engine, views: Views) -> None:
    metrics = metrics_of(table, by_source=True)
    statement = select(table, metrics, by_source=True, max_sources=MAX_SOURCES)
    rows = engine.query(statement.sql, views)
    names = shown_names(row["source"] for row in rows)
    measured.sources[table] = [{"source": names[row["source"]], "num_rows": row["num_rows"]} for row in rows]
    for row in rows:
        for metric in metrics:
            numerator, denominator = statement.columns[metric.name]
            assert denominator is not None, f"{metric.name} is no fraction"
            support = row[denominator]
            value = row[numerator] / (metric.weight * support) if support else None
            entry = {"kind": table, "source": names[row["source"]], "metric": PREFIXES[table] + metric.name}
            measured.by_source.append({**entry, "value": value, "num_rows": support})


def _add_repeats(measured: Measured, table: str, engine: Engine, views: Views) -> None:
    if table == "stepwise":
        return
    statements = {"preferences": whole_sql.pair_repeats, "feedback": whole_sql.feedback_repeats}
    (row,) = engine.query(statements.get(table, whole_sql.prompt_repeats)(table), views)
    prefix = PREFIXES[table]
    measured.put(f"{prefix}duplicate_rows_kept", row["duplicate_rows_kept"])
    if table in statements:
        measured.put(f"{prefix}conflicting_rows_kept", row["conflicting_rows_kept"])


def _add_ranges(measured: Measured, table: str, data: CheckedData, engine: Engine, views: Views) -> None:
    """Count the scores outside the range of their file's format."""
    if table not in ("preferences", "feedback"):
        return
    formats = {evidence.path: evidence.format for evidence in data.formats}
    wanted = {
        (column, *limits)
        for name in set(formats.values()) & set(SCORE_RANGES)
        for column, limits in SCORE_RANGES[name].items()
    }
    number = num_rows = 0
    for column, low, high in sorted(wanted):
        for row in engine.query(whole_sql.out_of_range(table, column, low, high), views):
            if SCORE_RANGES.get(formats.get(row["file"], ""), {}).get(column) == (low, high):
                number, num_rows = number + row["num_outside"], num_rows + row["num_rows"]
    why = "no file's format says what range its scores have"
    measured.put(f"{PREFIXES[table]}score_out_of_range", number if num_rows else None, num_rows, why)


def _add_groups(measured: Measured, tables: list[str], data: CheckedData, engine: Engine, views: Views) -> None:
    (row,) = engine.query(whole_sql.prompt_groups(tables), views)
    for name in ("prompts_on_both_sides", "evaluation_prompts_trained_on", "num_eval_groups"):
        measured.put(name, row[name])
    if row["num_clustered_rows"]:
        rows, prompts = row["clustered_rows"], row["num_all_prompts"]
        measured.put_fraction(
            "near_duplicates_across_splits", row["clustered_rows_on_both_sides"], rows, "no row is in a split"
        )
        if "near_duplicates_across_splits" in data.whole:
            # That number is taken in the end, and it is a share of prompts.
            measured.support["near_duplicates_across_splits"] = prompts
        measured.put("evaluation_clusters_trained_on", row["evaluation_clusters_trained_on"])
        if "near_duplicate_prompts_fraction" not in data.whole:
            number = prompts - row["num_clusters"]
            measured.put_fraction("near_duplicate_prompts_fraction", number, prompts, "no row is kept")
        else:
            measured.support["near_duplicate_prompts_fraction"] = prompts
    else:
        why = NO_NEAR_DUPLICATES if row["num_all_prompts"] else "no row is kept"
        for name in (
            "near_duplicates_across_splits",
            "evaluation_clusters_trained_on",
            "near_duplicate_prompts_fraction",
        ):
            measured.put(name, None, 0, why)
    for table in tables:
        prefix, kept = PREFIXES[table], int(measured.numbers[f"{PREFIXES[table]}examples_kept"] or 0)
        repeats = max(row[f"{prefix}largest_prompt_rows"] - 1, 0)
        measured.put(f"{prefix}num_prompts", row[f"{prefix}num_prompts"])
        measured.put_fraction(f"{prefix}largest_prompt_share", repeats, kept, "no row is kept")


def _add_over_long(measured: Measured, data: CheckedData, engine: Engine, views: Views) -> None:
    names = ("over_long_chosen_fraction", "over_long_rejected_fraction", "over_long_gap", "over_long_one_side_fraction")
    if data.limits is None:
        for name in names:
            measured.put(name, None, 0, NO_TOKENIZER)
        return
    (row,) = engine.query(whole_sql.over_long("preferences", data.limits.max_total_tokens), views)
    numbers = (row["num_chosen"], row["num_rejected"], row["num_chosen"] - row["num_rejected"], row["num_one_side"])
    for name, number in zip(names, numbers, strict=True):
        measured.put_fraction(name, number, row["num_rows"], "no row's tokens could be counted")


def _add_positions(measured: Measured, engine: Engine, views: Views) -> None:
    """Add how probable it is that order does not matter: over all pairs, and for the most lopsided annotator."""
    share, rows = measured.numbers["first_position_share"], measured.support["first_position_share"]
    number = None if share is None else round(share * rows)
    p_value = None if number is None else binomial_p_value(number, rows)
    measured.put("position_p_value", p_value, rows, measured.skipped.get("first_position_share"))
    people: Rows = engine.query(whole_sql.annotators(), views)
    measured.put("num_annotators_judged", len(people))
    # With many people, the smallest of their p-values is small by chance: times their number, it is not (Bonferroni).
    smallest = min((binomial_p_value(row["num_first"], row["num_rows"]) for row in people), default=None)
    corrected = None if smallest is None else min(1.0, smallest * len(people))
    why = "no annotator with 20 pairs whose order of answers is known"
    measured.put("annotator_position_p_value", corrected, len(people), why)


def binomial_p_value(number: int, trials: int) -> float:
    """Return the two-sided probability of a count as far from a half as this one when both outcomes are as likely.

    Exact; 1 for no trials.

    >>> binomial_p_value(50, 100), binomial_p_value(25, 25) < 1e-6
    (1.0, True)
    """
    from data_checks.samples.statistics import position_p_value

    found = position_p_value(number, trials - number)
    return 1.0 if found is None else found


def _add_unaccounted(measured: Measured, data: CheckedData) -> None:
    """Add how many examples are in one account but not in another: ledger, features and tables must agree."""
    outputs = {
        "preferences": ("train_pairs", "validation_pairs"),
        "feedback": ("train_feedback", "validation_feedback"),
    }
    for table, ledger in data.ledgers.items():
        prefix = PREFIXES[table]
        pairs = [
            (ledger.examples, measured.numbers.get(f"{prefix}examples_measured", 0)),
            (ledger.kept, measured.numbers.get(f"{prefix}examples_kept", 0)),
            (ledger.num_quarantined, measured.numbers.get(f"{prefix}examples_quarantined", 0)),
            (ledger.num_dropped, measured.numbers.get(f"{prefix}examples_dropped", 0)),
        ]
        if table in outputs and all(name in data.num_rows for name in outputs[table]):
            pairs.append((ledger.kept, sum(data.num_rows[name] for name in outputs[table])))
        missing = sum(abs(own - int(other or 0)) for own, other in pairs)
        # A row that is used in spite of a reason, or not used without one.
        missing += sum(int(measured.numbers.get(f"{prefix}{name}") or 0) for name in CONTRADICTIONS)
        measured.put("rows_unaccounted" if table == "preferences" else f"{prefix}unaccounted", missing)
