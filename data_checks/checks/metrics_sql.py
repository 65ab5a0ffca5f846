"""What is counted over the final features, as SQL that every engine runs unchanged.

Every statement is portable: `sum(case when … then 1 else 0 end)`, bitwise `&` and `|` on integers, plain arithmetic. A
fraction is two integers that are divided afterwards, so two engines agree on it to the last bit. Numbers with a point
are written with an exponent, since `0.5` is a decimal in one dialect and a double in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from data_checks.features.flags import Flag
from data_checks.result import INPUT_TABLES

PREFIXES = {
    "preferences": "",
    "feedback": "feedback_",
    "rl_prompts": "rl_prompts_",
    "eval_prompts": "eval_prompts_",
    "stepwise": "stepwise_",
}
"""Kind of input -> how the names of its numbers begin."""
ANSWERS = ("preferences", "feedback", "stepwise")
"""Kinds with answers in the columns chosen_*."""
JUDGED = ("preferences", "feedback")
PAIRS = ("preferences",)
PROMPTS = ("rl_prompts", "eval_prompts")
EVERY_ROW = "1 = 1"
KEPT = "fate = 'kept'"
DECIDED = f"{KEPT} and not coalesce(is_tie, false)"
"""Kept pairs of which one answer is preferred."""
PERSONAL = Flag.EMAIL | Flag.PHONE | Flag.IDENTITY_NUMBER | Flag.IP_ADDRESS


@dataclass(frozen=True)
class Metric:
    """One number: a count, or a count divided by another one."""

    name: str
    """Without the kind's prefix."""
    numerator: str
    """SQL of an integer, over all rows of a kind."""
    denominator: str | None
    """SQL of the integer it is divided by; None: the numerator is the number."""
    tables: tuple[str, ...]
    unit: str
    weight: int = 1
    """The denominator counts so many times a row; the number of rows that support it is the denominator itself."""
    empty: str = "no row is kept"
    """Why there is no number where the denominator is 0."""
    by_source: bool = False
    """Also measured for each source."""


def rows_where(condition: str) -> str:
    """Return SQL that counts the rows for which a condition is true."""
    return f"cast(coalesce(sum(case when {condition} then 1 else 0 end), 0) as bigint)"


def total(expression: str, condition: str) -> str:
    """Return SQL that adds up an integer expression over the rows for which a condition is true."""
    return f"cast(coalesce(sum(case when {condition} then {expression} else 0 end), 0) as bigint)"


def flagged(bits: int, parts: Iterable[str] = ("prompt", "chosen", "rejected")) -> str:
    """Return the condition that one of the texts has one of the flags."""
    union = " | ".join(f"coalesce({part}_flags, 0)" for part in parts)
    return f"(({union}) & {int(bits)}) <> 0"


def length(side: str) -> str:
    """Return SQL of an answer's length: in tokens, in characters where no tokenizer was given."""
    return f"coalesce({side}_tokens, {side}_characters)"


def _fraction(
    name: str,
    condition: str,
    tables: tuple[str, ...] = INPUT_TABLES,
    among: str = KEPT,
    empty: str = "no row is kept",
    by_source: bool = False,
) -> Metric:
    numerator = rows_where(f"{among} and {condition}")
    return Metric(name, numerator, rows_where(among), tables, "fraction", 1, empty, by_source)


def _count(name: str, condition: str, tables: tuple[str, ...] = INPUT_TABLES, unit: str = "rows") -> Metric:
    return Metric(name, rows_where(condition), None, tables, unit)


def _both_sides(name: str, bit: Flag) -> list[Metric]:
    """Return how often each side has a flag, the gap between them, and how often one side alone has it."""
    chosen, rejected = (flagged(bit, (side,)) for side in ("chosen", "rejected"))
    gap = f"(case when {chosen} then 1 else 0 end) - (case when {rejected} then 1 else 0 end)"
    kept = rows_where(KEPT)
    either = f"(case when {chosen} then 1 else 0 end) + (case when {rejected} then 1 else 0 end)"
    return [
        Metric(f"{name}_fraction", total(either, KEPT), kept, PAIRS, "fraction", 2),
        _fraction(f"chosen_{name}_fraction", chosen, PAIRS),
        _fraction(f"rejected_{name}_fraction", rejected, PAIRS),
        Metric(f"{name}_gap", total(gap, KEPT), kept, PAIRS, "points", 1, "no row is kept", True),
        _fraction(f"{name}_one_side_fraction", f"({chosen}) <> ({rejected})", PAIRS),
        _fraction(f"{name}_fraction", chosen, ("feedback", "stepwise")),
    ]


LONGER = (
    f"case when {length('chosen')} > {length('rejected')} then 2 "
    f"when {length('chosen')} = {length('rejected')} then 1 else 0 end"
)
HAS_LENGTHS = f"{DECIDED} and {length('chosen')} is not null and {length('rejected')} is not null"
HAS_SCORES = "chosen_score is not null and rejected_score is not null"
HAS_STRENGTH = f"(({HAS_SCORES}) or margin is not null)"
HAS_POSITION = f"{DECIDED} and chosen_position is not null"

METRICS: tuple[Metric, ...] = (
    _count("examples_measured", EVERY_ROW),
    _count("examples_kept", KEPT),
    _count("examples_quarantined", "fate = 'quarantined'"),
    _count("examples_dropped", "fate = 'dropped'"),
    _count("kept_with_reason", f"{KEPT} and reason is not null"),
    _count("quarantined_without_reason", "fate = 'quarantined' and reason is null"),
    _count("num_train", f"{KEPT} and split = 'train'", JUDGED),
    _count("num_validation", f"{KEPT} and split = 'validation'", JUDGED),
    Metric(
        "quarantined_share", rows_where("fate = 'quarantined'"), rows_where(EVERY_ROW), INPUT_TABLES, "fraction", 1,
        "there are no rows", True,
    ),
    _count("empty_rows_kept", f"{KEPT} and coalesce(prompt_characters, 0) = 0", PROMPTS),
    _count(
        "empty_rows_kept",
        f"{KEPT} and (coalesce(prompt_characters, 0) = 0 or coalesce(chosen_characters, 0) = 0 "
        "or coalesce(chosen_words, 0) = 0 or rejected_characters = 0 or rejected_words = 0)",
        ANSWERS,
    ),
    _fraction("mojibake_fraction", flagged(Flag.MOJIBAKE), by_source=True),
    _fraction("control_fraction", flagged(Flag.CONTROL)),
    _fraction("invisible_fraction", flagged(Flag.INVISIBLE)),
    _fraction("marker_fraction", flagged(Flag.MARKER), by_source=True),
    _count("secret_rows", flagged(Flag.SECRET)),
    _count("secret_rows_kept", f"{KEPT} and {flagged(Flag.SECRET)}"),
    _fraction("email_fraction", flagged(Flag.EMAIL)),
    _fraction("phone_fraction", flagged(Flag.PHONE)),
    _fraction("identity_number_fraction", flagged(Flag.IDENTITY_NUMBER)),
    _fraction("ip_address_fraction", flagged(Flag.IP_ADDRESS)),
    _fraction("pii_fraction", flagged(PERSONAL), by_source=True),
    *_both_sides("truncated", Flag.TRUNCATED),
    *_both_sides("refusal", Flag.REFUSAL),
    Metric(
        "chosen_longer_share", total(LONGER, HAS_LENGTHS), rows_where(HAS_LENGTHS), PAIRS, "fraction", 2,
        "no kept pair prefers an answer", True,
    ),
    _fraction(
        "tie_fraction", "is_tie", PAIRS, "is_tie is not null", "no row could be read as a pair", True
    ),
    _count(
        "ties_called_preferences", f"{DECIDED} and (margin = 0 or (chosen_score = rejected_score))", PAIRS, "pairs"
    ),
    _fraction(
        "score_inverted_fraction", f"({HAS_SCORES} and chosen_score < rejected_score) or coalesce(margin, 0) < 0",
        PAIRS, HAS_STRENGTH,
        "no row has a margin, or a score of both answers", True,
    ),
    _fraction("same_words_fraction", "chosen_key = rejected_key", PAIRS),
    _fraction(
        "first_position_share", "chosen_position = 1", PAIRS, HAS_POSITION,
        "the data does not say in which order the answers were shown", True,
    ),
    _count("num_labelled", f"{KEPT} and label is not null", ("feedback",)),
    _count("num_rated", f"{KEPT} and rating is not null", ("feedback",)),
    _fraction(
        "good_share", "label", ("feedback",), f"{KEPT} and label is not null", "no kept row has a label", True
    ),
    _fraction("without_judgement_kept_fraction", "label is null and rating is null", ("feedback",)),
)  # fmt: skip
"""All that one pass over the rows of a kind counts."""


def metrics_of(table: str, *, by_source: bool = False) -> list[Metric]:
    """Return the metrics of a kind of input; with `by_source` those that are also measured for each source."""
    return [metric for metric in METRICS if table in metric.tables and (metric.by_source or not by_source)]


@dataclass(frozen=True)
class Select:
    """One statement, and which of its columns hold a metric's two integers."""

    sql: str
    columns: Mapping[str, tuple[str, str | None]]
    """Metric -> column of its numerator, column of its denominator."""


def select(table: str, metrics: Iterable[Metric], by_source: bool = False, max_sources: int = 0) -> Select:
    """Return one statement for all metrics; equal expressions are counted once.

    Args:
        table: the view with the rows.
        metrics: what to count.
        by_source: one row a source (column `source`, with the number of its rows as `num_rows`) instead of one row.
        max_sources: so many sources, those with the most rows.
    """
    places: dict[str, str] = {}
    columns = {}
    for metric in metrics:
        pair = [
            None if text is None else places.setdefault(text, f"c{len(places)}")
            for text in (metric.numerator, metric.denominator)
        ]
        columns[metric.name] = (str(pair[0]), pair[1])
    listed = ", ".join(f"{text} as {place}" for text, place in places.items())
    if not by_source:
        return Select(f"select {listed} from {table}", columns)
    sql = (
        f"select coalesce(source, '') as source, count(*) as num_rows, {listed} from {table} "
        f"group by coalesce(source, '') order by num_rows desc, source limit {max_sources}"
    )
    return Select(sql, columns)
