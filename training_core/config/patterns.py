"""Simple regular expressions in words: what a message says in place of the expression."""

from __future__ import annotations

import re

TOKEN = re.compile(r"(\[(?:\\.|[^\]\\])+\]|\\\w|[^\\\[\]*+?{}()|.])(\*|\+|\{\d+\})?")
MEMBER = re.compile(r"\\w|\\?.-\\?.|\\?.")
RANGES = {
    "a-z": ("lower-case letters", "a lower-case letter"),
    "A-Z": ("capital letters", "a capital letter"),
    "0-9": ("digits", "a digit"),
    "\\w": ("letters, digits, `_`", "a letter, a digit, `_`"),
}
"""A part of a character class -> many of them, one of them."""
ANY_LETTER = ("letters", "a letter")


def pattern_in_words(pattern: str) -> str | None:
    """Return what a text must consist of, or None for an expression that is not simple.

    Simple is one class of characters, once counted or repeated, or one for the first character and one for the rest.

    >>> pattern_in_words("^[a-z][a-z0-9-]*$")
    'lower-case letters, digits and `-` only, beginning with a lower-case letter'
    >>> pattern_in_words("^[0-9a-f]{64}$")
    '64 characters, each of them a digit or one of the letters a to f'
    """
    body = pattern.removeprefix("^").removesuffix("$")
    tokens = [(match[1], match[2] or "") for match in TOKEN.finditer(body)]
    if "".join(map("".join, tokens)) != body:
        return None
    if len(tokens) == 1:
        characters, count = tokens[0]
        if count.startswith("{"):
            return f"{count[1:-1]} characters, each of them {_joined(_names(characters, 1), 'or')}"
        return f"{_joined(_names(characters, 0), 'and')} only" if count else None
    if len(tokens) == 2 and not tokens[0][1] and tokens[1][1] == "*":
        first, rest = (_names(tokens[0][0], 1), _names(tokens[1][0], 0))
        return f"{_joined(rest, 'and')} only, beginning with {_joined(first, 'or')}"
    return None


def _names(characters: str, number: int) -> list[str]:
    """Return the members of a class in words: many of each (`number` 0), or one of each (1)."""
    members = MEMBER.findall(characters[1:-1] if characters.startswith("[") else characters)
    if "a-z" in members and "A-Z" in members:
        members = ["letters", *(member for member in members if member not in ("a-z", "A-Z"))]
    return [_name(member, number) for member in members]


def _name(member: str, number: int) -> str:
    if member == "letters":
        return ANY_LETTER[number]
    if member in RANGES:
        return RANGES[member][number]
    if len(member) == 3 and member[1] == "-":
        return f"{'one of ' if number else ''}the letters {member[0]} to {member[2]}"
    return f"`{member[-1]}`"


def _joined(names: list[str], last: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
