"""Numbers that follow from the account of rows: how many are used, and how often each defect was found."""

from __future__ import annotations

from data_checks.checks.measured import Measured
from data_checks.checks.metrics_sql import ANSWERS, JUDGED, PREFIXES, PROMPTS
from data_checks.config import CheckDataConfig
from data_checks.result import INPUT_TABLES, CheckedData, Ledger
from data_checks.rows import Policy, Reason

NO_TOKENIZER = "no tokenizer was given"
DEFECTS: dict[str, tuple[tuple[Reason, ...], tuple[str, ...]]] = {
    "malformed_fraction": ((Reason.MALFORMED_JSON, Reason.INVALID_UNICODE, Reason.ROW_TOO_LARGE), INPUT_TABLES),
    "schema_drift_fraction": ((Reason.WRONG_TYPE,), INPUT_TABLES),
    "nul_fraction": ((Reason.NUL_CHARACTER,), INPUT_TABLES),
    "role_order_fraction": ((Reason.ROLE_ORDER,), INPUT_TABLES),
    "last_turn_fraction": ((Reason.LAST_TURN_NOT_ASSISTANT, Reason.LAST_TURN_NOT_USER), INPUT_TABLES),
    "empty_prompt_fraction": ((Reason.EMPTY_PROMPT,), INPUT_TABLES),
    "empty_fraction": ((Reason.EMPTY_RESPONSE,), ANSWERS),
    "identical_fraction": ((Reason.IDENTICAL_RESPONSES,), ("preferences",)),
    "prompt_mismatch_fraction": ((Reason.PROMPT_MISMATCH,), ("preferences",)),
    "ties_without_policy_fraction": ((Reason.UNDECLARED_TIE,), ("preferences",)),
    "missing_judgement_fraction": ((Reason.MISSING_JUDGEMENT,), ("feedback",)),
    "contaminated_fraction": ((Reason.PROMPT_IN_EVALUATION,), (*JUDGED, "rl_prompts")),
    "gold_rejected_fraction": ((Reason.GOLD_REJECTED,), PROMPTS),
    "duplicate_prompts_fraction": ((Reason.DUPLICATE_PROMPT,), PROMPTS),
}
"""Number -> what is found in a row, and in which kinds of input."""
OF_ROWS = frozenset({"malformed_fraction", "schema_drift_fraction", "nul_fraction"})
"""Defects of rows that became nothing else: one row, one example."""
TOKEN_DEFECTS: dict[str, tuple[Reason, ...]] = {
    "special_token_fraction": (Reason.SPECIAL_TOKENS,),
    "template_failed_fraction": (Reason.TEMPLATE_FAILED,),
    "too_long_fraction": (Reason.PROMPT_TOO_LONG, Reason.RESPONSE_TOO_LONG, Reason.TOO_LONG),
}
REPEATS = {"preferences": "", "feedback": "feedback_"}


def add_ledger_numbers(measured: Measured, data: CheckedData, config: CheckDataConfig) -> None:
    """Add the account of each kind of input that was read."""
    for table, ledger in data.ledgers.items():
        _add_account(measured, table, ledger)
        _add_defects(measured, table, ledger, data)
        if table in REPEATS:
            _add_repeats(measured, table, ledger, data)
    if config.eval_prompts is None and "rl_prompts" in data.ledgers:
        _forgive_held_out(measured, data.ledgers["rl_prompts"])


def _add_account(measured: Measured, table: str, ledger: Ledger) -> None:
    prefix = PREFIXES[table]
    names = {"": "rows_kept", "feedback_": "feedback_kept"}
    measured.put(f"{prefix}rows", ledger.rows)
    measured.put(f"{prefix}examples", ledger.examples)
    for word, number in (
        ("kept", ledger.kept),
        ("quarantined", ledger.num_quarantined),
        ("dropped", ledger.num_dropped),
    ):
        measured.put(names.get(prefix, f"{prefix}kept") if word == "kept" else f"{prefix or 'rows_'}{word}", number)
    why = "there are no rows"
    measured.put_fraction(f"{prefix}quarantined_fraction", ledger.num_quarantined, considered(ledger), why)
    measured.put_fraction(f"{prefix}dropped_fraction", ledger.num_dropped, ledger.examples, why)


def considered(ledger: Ledger) -> int:
    """Return how many examples there are beside those that ranked rows could have given and a cap left out."""
    return ledger.examples - ledger.dropped.get(Policy.PAIRS_PER_ROW.value, 0)


def found(ledger: Ledger, reasons: tuple[Reason, ...]) -> int:
    """Return in how many examples one of the reasons was found; of several in one example, each counts."""
    counts = [ledger.defects[reason.value].rows for reason in reasons if reason.value in ledger.defects]
    return min(sum(counts), ledger.examples)


def _add_defects(measured: Measured, table: str, ledger: Ledger, data: CheckedData) -> None:
    prefix, why = PREFIXES[table], "there are no rows"
    for name, (reasons, tables) in DEFECTS.items():
        if table in tables:
            support = ledger.rows if name in OF_ROWS else considered(ledger)
            measured.put_fraction(f"{prefix}{name}", min(found(ledger, reasons), support), support, why)
    for name, reasons in TOKEN_DEFECTS.items():
        if data.limits is None:
            measured.put(f"{prefix}{name}", None, 0, NO_TOKENIZER)
        elif name == "too_long_fraction" and table != "stepwise":
            # An example may be too long in several ways: by the one it is put aside for, it counts once.
            number = sum(ledger.quarantined.get(reason.value, 0) for reason in reasons)
            measured.put_fraction(f"{prefix}{name}", number, considered(ledger), why)
        elif name != "too_long_fraction":
            measured.put_fraction(f"{prefix}{name}", found(ledger, reasons), considered(ledger), why)
        else:
            measured.put(f"{prefix}{name}", None, 0, "the length of steps is not limited")


def _add_repeats(measured: Measured, table: str, ledger: Ledger, data: CheckedData) -> None:
    """Add the fractions of rows that repeat or contradict others, whatever the policy did with them."""
    prefix = REPEATS[table]
    names = {"duplicate_fraction": f"num_{prefix}duplicates", "conflicting_fraction": f"num_{prefix}conflicts"}
    if table == "preferences":
        names["cycle_fraction"] = "num_cycle_rows"
    for name, counted in names.items():
        number = data.whole.get(counted)
        if number is None:
            # Left to the caller's reasons: without one, the check is an error.
            measured.put(f"{prefix}{name}", None, 0, data.skipped.get(counted))
        else:
            measured.put_fraction(f"{prefix}{name}", int(number), considered(ledger), "there are no rows")


def _forgive_held_out(measured: Measured, ledger: Ledger) -> None:
    """Do not count RL prompts that the split itself put on the other side: the file is not to blame."""
    held_out = ledger.quarantined.get(Reason.PROMPT_IN_EVALUATION.value, 0)
    why = "there are no rows"
    number = ledger.num_quarantined - held_out
    measured.put_fraction("rl_prompts_quarantined_fraction", number, ledger.examples, why)
    measured.put_fraction("rl_prompts_contaminated_fraction", 0, ledger.examples, why)
