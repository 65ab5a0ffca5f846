"""Answers judged step by step, for process supervision."""

from __future__ import annotations

from typing import Any

from data_checks.formats.base import Format, Options, Result, RowError
from data_checks.formats.turns import as_turns, extra_of, source_of
from data_checks.naming import name_columns
from data_checks.rows import RawRow, StepwiseRow, Turn, kind_of


def fits_stepwise(value: dict[str, Any]) -> bool:
    steps, labels = value.get("completions"), value.get("labels")
    if not isinstance(value.get("prompt"), str | list) or not isinstance(steps, list) or not isinstance(labels, list):
        return False
    return all(isinstance(step, str) for step in steps)


def stepwise_rows(row: RawRow, options: Options) -> list[Result]:
    """Return the answer of a row, one assistant turn a step.

    Raises:
        RowError: it holds none, or not one label a step.
    """
    value = row.value or {}
    for column in ("prompt", "completions", "labels"):
        if column not in value:
            raise RowError(f"no {column}; columns: {name_columns(value)}")
    prompt = as_turns(value["prompt"], "prompt", "user")
    steps = _items(value["completions"], "completions", str, "text")
    labels = value["labels"]
    if isinstance(labels, list):  # Many tables write 1 and 0.
        labels = [bool(item) if type(item) is int and item in (0, 1) else item for item in labels]
    labels = _items(labels, "labels", bool, "true or false")
    if len(steps) != len(labels):
        raise RowError(f"{len(steps)} completions and {len(labels)} labels: each step needs one")
    answer = tuple(Turn("assistant", step) for step in steps)
    extra = extra_of(value, ("prompt", "completions", "labels", "source"))
    return [StepwiseRow(row, source_of(value, options.source), prompt, answer, tuple(labels), extra=extra)]


def _items(value: Any, column: str, kind: type, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowError(f"{column} is {kind_of(value)}, not a list")
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            raise RowError(f"{column}[{index}] is {kind_of(item)}, not {what}")
    return value


STEPWISE = Format(
    name="stepwise",
    kind="stepwise",
    summary="prompt, completions (a list of steps) and labels (true or false, one a step)",
    columns=frozenset({"prompt", "completions", "labels", "source"}),
    fits=fits_stepwise,
    convert=stepwise_rows,
    refines=frozenset({"prompts"}),
    label_kind="stepwise",
    needs=("prompt", "completions", "labels"),
)
