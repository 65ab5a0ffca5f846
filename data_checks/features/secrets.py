"""Keys and passwords, by their shape and their randomness. Nothing here returns or logs what matched.

Shapes: the vendors' own descriptions of their key formats, as secret scanners use them.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_checks.features.column import Rows, TextColumn

_WORDS = (
    "password|passwd|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key|auth[_-]?key|private[_-]?key|account[_-]?key"
    "|encryption[_-]?key|signing[_-]?key|secret[_-]?key|connection[_-]?string"
)
_CANDIDATE = (
    r"A[KSB]IA|ACCA|-----BEGIN|gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|hooks\.slack\.com|AIza|[sr]k_live_|eyJ"
    r"|npm_|SG\.|pypi-|://[^\s/@]*:[^\s/@]*@"
    rf"""|(?i:(?:{_WORDS})[\w-]{{0,20}}["'`]?\s*(?::=|=>|=|:))"""
)
"""In RE2 syntax; every rule below needs one of these."""

_PLACEHOLDER = re.compile(
    r"example|sample|dummy|placeholder|your|change.?me|redacted|insert|replace|todo|fake|mock|notreal|not-a-real|xxxx"
    r"|\*{3}|\.{3}|…|[<>{}]|\$\(|%s|0{8}|password|passwd|secret|token|key|process\.env|getenv|environ|1234567890123456",
    re.IGNORECASE,
)
_REPEATED = re.compile(r"(.)\1{4}")
_RANDOM_BITS = 3.0
"""Least entropy (bits a character) of a key. Random base62 of 20 characters has about 4.1, random hex of 32 about 3.7;
a key of one repeated letter 0, of a word or two written out about 2.8."""


class Rule(NamedTuple):
    """One vendor's keys."""

    name: str
    pattern: re.Pattern[str]
    accept: Callable[[str], bool]
    """Whether the match (its first group, if it has one) is a key and no placeholder."""


def entropy(text: str) -> float:
    """Return Shannon's entropy of the characters of a text, in bits a character.

    >>> entropy("aaaa"), entropy("abcd")
    (0.0, 2.0)
    """
    counts = Counter(text).values()
    return sum(count / len(text) * math.log2(len(text) / count) for count in counts)


def _is_random(value: str) -> bool:
    return entropy(value) >= _RANDOM_BITS and not _REPEATED.search(value)


def _is_key(value: str) -> bool:
    """Return whether what follows a vendor's prefix is a key; the prefix has said enough to be lenient."""
    words = re.search(r"example|your|placeholder|dummy|redacted|xxxx|\.{3}", value, re.IGNORECASE)
    return words is None and _is_random(value) and any(c.isdigit() for c in value)


def _is_letters_key(value: str) -> bool:
    """Like `_is_key`, for vendors whose keys may be letters alone: their case must be mixed."""
    return _is_key(value + "0") and (not value.isalpha() or not (value.islower() or value.isupper()))


def _is_token(token: str) -> bool:
    """Return whether three base64url parts are a signed JSON web token, and not the one of the tutorials."""
    header, payload, _ = token.split(".")
    return "alg" in _decoded(header) and _decoded(payload).get("sub") != "1234567890"


def _decoded(part: str) -> dict[str, object]:
    try:
        value = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_password(value: str) -> bool:
    """Return whether a value is random rather than a word, a name in code or a placeholder."""
    if _PLACEHOLDER.search(value) or "://" in value or _REPEATED.search(value):
        return False
    digits = sum(c.isdigit() for c in value)
    letters = sum(c.isalpha() for c in value)
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value)
    if len(value) < 16:
        signs = any(c in "!@#$%^&*+=?~" for c in value)
        return entropy(value) >= 2.9 and letters >= 3 and ((signs and digits >= 1) or (mixed and digits >= 2))
    return entropy(value) >= _RANDOM_BITS and digits >= 2 and letters >= 4 and (mixed or digits >= 4)


_BASE = r"[A-Za-z0-9_-]"
_RULES = (
    Rule("aws", re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)([A-Z0-9]{16})(?![A-Za-z0-9])"), _is_random),
    Rule(
        "pem",
        re.compile(
            r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:\s|\\[nr]|[\w-]{1,40}: [^\n\\]{1,80}(?:\n|\\n))*([A-Za-z0-9+/=]{40,})"
        ),
        lambda value: entropy(value) >= 4,
    ),
    Rule("github", re.compile(r"(?<![A-Za-z0-9])gh[pousr]_([A-Za-z0-9]{36,255})(?!\w)"), _is_key),
    Rule("github_fine", re.compile(r"(?<![A-Za-z0-9])github_pat_(\w{50,255})"), _is_key),
    Rule("gitlab", re.compile(rf"(?<![A-Za-z0-9])glpat-({_BASE}{{20,}})"), _is_letters_key),
    Rule("hugging_face", re.compile(r"(?<![A-Za-z0-9])hf_([A-Za-z0-9]{34,40})(?!\w)"), _is_letters_key),
    Rule("openai", re.compile(r"(?<![A-Za-z0-9-])sk-([A-Za-z0-9]{32,64})(?![\w-])"), _is_key),
    Rule("openai_project", re.compile(rf"(?<![A-Za-z0-9-])sk-(?:proj|svcacct|admin|or-v1)-({_BASE}{{32,}})"), _is_key),
    Rule("anthropic", re.compile(rf"(?<![A-Za-z0-9-])sk-ant-(?:[a-z0-9]+-)?({_BASE}{{32,}})"), _is_key),
    Rule("slack", re.compile(r"(?<![A-Za-z0-9])xox[abeoprs]-((?:\d{6,}-){1,3}[A-Za-z0-9-]{10,})"), _is_key),
    Rule("slack_hook", re.compile(r"hooks\.slack\.com/services/(T\w{8,}/B\w{8,}/\w{20,})"), _is_key),
    Rule("google", re.compile(rf"(?<![A-Za-z0-9])AIza({_BASE}{{35}})(?!{_BASE})"), _is_letters_key),
    Rule("stripe", re.compile(r"(?<![A-Za-z0-9])[sr]k_live_([A-Za-z0-9]{16,})"), _is_letters_key),
    Rule("npm", re.compile(r"(?<![A-Za-z0-9])npm_([A-Za-z0-9]{36})(?!\w)"), _is_key),
    Rule("sendgrid", re.compile(rf"(?<![A-Za-z0-9])SG\.({_BASE}{{22}}\.{_BASE}{{43}})(?!{_BASE})"), _is_key),
    Rule("pypi", re.compile(rf"(?<![A-Za-z0-9])pypi-AgEIcHlwaS5vcmc({_BASE}{{50,}})"), _is_key),
    Rule("jwt", re.compile(r"(?<![\w-])(eyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]{16,})"), _is_token),
    Rule("address", re.compile(r"://[^\s:/@\"']{1,64}:([^\s:/@\"']{8,128})@"), _is_password),
    Rule(
        "assigned",
        re.compile(
            rf"""(?i:{_WORDS})(?:[_-]\w{{0,20}})?["'`]?\s{{0,3}}(?::=|=>|=|:)\s{{0,3}}["'`]([^\s"'`]{{8,200}})["'`]"""
        ),
        _is_password,
    ),
    Rule(
        "environment",
        re.compile(
            rf"(?m)^[ \t]*(?:export[ \t]+|[-*][ \t]+)?(?i:\w{{0,40}}?(?:{_WORDS})(?:_\w{{0,20}})?)[ \t]?[=:][ \t]?"
            r"([^\s\"'`(),;\[\]]{16,200})[ \t\r]*$"
        ),
        _is_password,
    ),
)
RULES = {rule.name: rule for rule in _RULES}


def may_have_secret(column: TextColumn) -> Rows:
    return column.matching(_CANDIDATE, column.rows_at(np.flatnonzero(_may_be_in_key(column.bytes))))


def _may_be_in_key(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mark bytes of which every candidate has one: a sign, a second capital in a row, or the end of `eyJ`."""
    found = data == ord("_")
    for sign in "-=:/":
        found |= data == ord(sign)
    capital = (data - np.uint8(ord("A"))) < 26
    found[1:] |= capital[1:] & (capital[:-1] | (data[:-1] == ord("y")))
    return np.asarray(found)


def has_secret(text: str) -> bool:
    """Return whether a key or password stands in a text."""
    return any(rule.accept(match.group(1)) for rule in _RULES for match in rule.pattern.finditer(text))
