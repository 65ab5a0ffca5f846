"""Numbers in text: found as people and models write them, read exactly."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Percent = Literal["hundredth", "ignore"]

MAX_DIGITS = 400
"""Longest number that is read: exact arithmetic on longer ones would cost more than an answer is worth."""
MAX_EXPONENT = 400

BOXED = r"\boxed"

_SIGN = r"(?:(?<![\w.)\]}])[-+])?"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?|\.\d+)"
_EXPONENT = r"(?:[eE][-+]?\d+(?![\w])|\s?(?:\\times|\\cdot|×|\*)\s?10\s?(?:\^|\*\*)\s?\{?(?P<power>[-+]?\d+)\}?)?"
NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})[$€£]?(?:"
    rf"\\d?t?frac\{{(?P<top>[-+]?{_DECIMAL})\}}\{{(?P<bottom>[-+]?{_DECIMAL})\}}"
    rf"|(?<![\w.])(?P<numerator>{_DECIMAL})\s?/\s?(?P<denominator>{_DECIMAL})(?![\w/])"
    rf"|(?<![A-Za-z_\d.])(?P<decimal>{_DECIMAL})(?P<exponent>{_EXPONENT})"
    r")(?P<percent>\s?\\?%)?"
)

_PLAIN = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})


def read_number(match: re.Match[str], percent: Percent) -> Fraction | None:
    """Return the value of a match of `NUMBER`; None when it is no finite number or too long to read."""
    if len(match[0]) > MAX_DIGITS:
        return None
    top = match["top"] or match["numerator"]
    if top is not None:
        below = Fraction((match["bottom"] or match["denominator"]).replace(",", ""))
        if below == 0:
            return None
        value = Fraction(top.replace(",", "")) / below
    else:
        value = Fraction(match["decimal"].replace(",", ""))
        power = int(match["power"] or (match["exponent"] or "e0")[1:])
        if abs(power) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** power
    if match["sign"] == "-":
        value = -value
    return value / 100 if match["percent"] and percent == "hundredth" else value


def numbers_in(text: str, percent: Percent = "hundredth") -> list[Fraction]:
    r"""Return the numbers that stand in a text, in order.

    A sign belongs to a number unless it follows a word or another number: `10-5` holds 10 and 5. Digits that end a
    word (`H2`, `x_1`) are no number.

    >>> [str(value) for value in numbers_in(r"1,234.5, 10-5, -3/4, \frac{1}{-8}, 1.5e-3, 2 \times 10^{3}, H2")]
    ['2469/2', '10', '5', '-3/4', '-1/8', '3/2000', '2000']
    >>> numbers_in("50%"), numbers_in("50%", percent="ignore"), numbers_in("none")
    ([Fraction(1, 2)], [Fraction(50, 1)], [])
    """
    plain = text.translate(_PLAIN).replace("{,}", ",").replace(r"\,", "").replace(r"\!", "").replace(r"\$", "$")
    values = (read_number(match, percent) for match in NUMBER.finditer(plain))
    return [value for value in values if value is not None]


def braced(text: str, command: str = BOXED) -> str | None:
    r"""Return what stands within the braces of the last `command{...}`; None when there is none, or it never closes.

    >>> braced(r"so \boxed{\frac{3}{4}} and \boxed{7}"), braced(r"\boxed{\frac{3}{4}}"), braced(r"\boxed{3")
    ('7', '\\frac{3}{4}', None)
    """
    start = text.rfind(command + "{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len(command), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(command) + 1 : position]
    return None


def number_at(text: str, marker: str | None, percent: Percent) -> Fraction | None:
    r"""Return the number that a text gives as its result; None when there is none at that place.

    Args:
        text: an answer or a reference.
        marker: None for the last number; `\boxed` for the last one within the last `\boxed{...}`; any other text for
            the first number after its last place.
        percent: what `%` means.

    >>> [str(number_at("7 then #### 8, not 9", marker, "ignore")) for marker in (None, "####", "Answer:")]
    ['9', '8', 'None']
    """
    if marker is None:
        return next(iter(reversed(numbers_in(text, percent))), None)
    if marker == BOXED:
        inside = braced(text)
        return None if inside is None else number_at(inside, None, percent)
    _, found, after = text.rpartition(marker)
    return next(iter(numbers_in(after, percent)), None) if found else None


def nearly_equal(value: Fraction, reference: Fraction, *, absolute: float, relative: float) -> bool:
    """Return whether `|value - reference| <= max(absolute, relative * |reference|)`, computed exactly.

    Special cases: with both tolerances 0 this is equality.

    >>> one = Fraction(10**20)
    >>> nearly_equal(one + 1, one, absolute=0, relative=0), nearly_equal(one + 1, one, absolute=1, relative=0)
    (False, True)
    """
    return abs(value - reference) <= max(Fraction(absolute), Fraction(relative) * abs(reference))
