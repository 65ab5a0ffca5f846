"""docs/faults.md names tests that exist, for every fault."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NUM_FAULTS = 50
NOT_HERE = "Cannot occur: "


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the table."""
    lines = [line for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def problems(page: str) -> list[str]:
    """Return what is wrong with the table."""
    table = rows(page)
    found = []
    if [row[0] for row in table] != [str(number) for number in range(1, NUM_FAULTS + 1)]:
        found.append(f"rows are {', '.join(row[0] for row in table)}")
    for row in table:
        number, fault, here, cell = row if len(row) == 4 else (row[0], "", "", "")
        names = re.findall(r"`([^`]+)`", cell)
        if not fault or not here or (not names and not here.startswith(NOT_HERE)):
            found.append(f"fault {number} has no test, and no reason why it cannot occur")
        for name in names:
            path, _, test = name.partition("::")
            file = ROOT / (path if "/" in path else f"tests/training_core/{path}")
            if not file.is_file() or test not in functions_of(file):
                found.append(f"fault {number}: there is no test {name}")
    return found


def test_every_fault_has_a_test_or_a_reason() -> None:
    assert problems(PAGE) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("| 7 |", "| 8 |", "rows are"),
        ("::test_zero_is_a_score", "::test_zero_is_no_score", "fault 39: there is no test"),
        ("`test_lora.py", "`test_lore.py", "fault 32: there is no test"),
        ("Cannot occur: ", "", "fault 45 has no test"),
    ],
)
def test_a_page_that_says_something_else_is_found(before: str, after: str, expected: str) -> None:
    assert before in PAGE
    assert any(problem.startswith(expected) for problem in problems(PAGE.replace(before, after, 1)))
