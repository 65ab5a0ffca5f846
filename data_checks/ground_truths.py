"""What a ground truth looks like, which says how to compare an answer with it."""

from __future__ import annotations

import re
from typing import Any, Literal

import orjson

from training_core.rewards.number_text import NUMBER

Shape = Literal["text", "number", "solution", "latex"]
"""Anything; a number; a worked solution that ends in `#### number`; mathematics."""

MARKER = "####"
"""What stands before the result of a worked solution in GSM8K and the data sets made like it."""
MAX_LATEX_LENGTH = 1000
"""Longest text, in characters, that is taken for one expression: programs hold backslashes and carets too."""
MAX_NUMBER_LENGTH = 500
MAX_RESULT_LENGTH = 60

LATEX = re.compile(r"\\[A-Za-z]+|\^|\$[^$]+\$")
WORDS = re.compile(r"\s*\$?\s*\\(?:text|textbf|mbox|mathrm)\s*\{[^{}]*\}\s*\$?\s*")
"""Words in LaTeX's clothes: nothing to compute with."""
NO_ARGUMENT = re.compile(r"\\(?:[dt]?frac|sqrt)\s*(?:\Z|[)}$])")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
SIZED = re.compile(r"\\(left|right)(?![A-Za-z])")
DASHES = str.maketrans({"−": "-", "–": "-"})


def shape_of(gold: Any) -> Shape:
    r"""Return what a ground truth that is no list and no object looks like.

    >>> [shape_of(gold) for gold in (18, "1,234", "50%", "so it is 18.\n#### 18", r"\sqrt{2}", "x^2", "Paris", True)]
    ['number', 'number', 'number', 'solution', 'latex', 'latex', 'text', 'text']
    >>> shape_of(r"\text{Friday}")
    'text'
    """
    if isinstance(gold, int | float):
        return "text" if isinstance(gold, bool) else "number"
    text = str(gold).strip()
    if len(text) <= MAX_NUMBER_LENGTH and NUMBER.fullmatch(text.translate(DASHES)):
        return "number"
    if len(text.rpartition(MARKER)[2]) <= MAX_RESULT_LENGTH and MARKER in text:  # Else a heading of Markdown.
        return "solution"
    if len(text) <= MAX_LATEX_LENGTH and LATEX.search(text) and not WORDS.fullmatch(text):
        return "latex"
    return "text"


def unreadable_latex(text: str) -> str | None:
    r"""Return why no reader of LaTeX can take a text for what was meant, None when nothing is wrong with its form.

    math-verify itself falls back to comparing characters, so that only an equally broken answer would be right.

    >>> unreadable_latex(r"\frac{1}{2}"), unreadable_latex(r"\{1\}"), unreadable_latex(r"\left(1, 2\right]")
    (None, None, None)
    >>> unreadable_latex(r"\frac{1}{"), unreadable_latex(r"\sqrt")
    ('the ground truth has braces that do not match', 'the ground truth has a fraction or root without arguments')
    """
    depth = 0
    for found in BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth < 0:
            break
    if depth:
        return "the ground truth has braces that do not match"
    if NO_ARGUMENT.search(text):
        return "the ground truth has a fraction or root without arguments"
    sized = [found[1] for found in SIZED.finditer(text)]
    if sized.count("left") != sized.count("right"):
        return r"the ground truth has \left and \right that do not match"
    return None


def is_structured(gold: Any) -> bool:
    """Return whether a text is itself the JSON of an object or a list: tests of a program, for example.

    >>> is_structured('{"inputs": ["1"]}'), is_structured("[1, 2)"), is_structured("{1, 2}"), is_structured("3")
    (True, False, False, False)
    """
    return isinstance(gold, str) and gold.lstrip().startswith(("{", "[")) and loads_or(gold, None) is not None


def loads_or(text: str, default: Any) -> Any:
    """Return what a JSON text says; the default where it is no JSON, or nested deeper than this reader goes.

    >>> loads_or("[1]", None), loads_or("[" * 5000 + "]" * 5000, None)
    ([1], None)
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return default
