"""How an answer is laid out, counted: what a reward model could learn instead of quality."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_checks.features.column import TextColumn

BULLET = r"(?m)^[ \t]*(?:[-*+•‣◦]|\d{1,3}[.)])[ \t]+\S"
BULLET_STARTS = " \t-*+•‣◦0123456789"
HEADER = r"(?m)^#{1,6}[ \t]+\S"
FENCE = r"`{3,}"
BOLD = r"(?m)(?:^|[^\w*])\*\*[^\s*](?:[^*\n]*[^\s*])?\*\*"
"""Not after a letter or digit: 2**3 and 4**5 are powers."""

_PICTURE = r"[\x{231a}\x{231b}\x{23e9}-\x{23f3}\x{25fd}\x{25fe}\x{2600}-\x{27bf}\x{2b50}\x{2b55}\x{1f300}-\x{1faff}]"
_PICTURE = f"(?:{_PICTURE}|[\\x{{1f000}}-\\x{{1f0ff}}\\x{{1f170}}-\\x{{1f19a}}])"
_DRESS = r"[\x{fe0f}\x{1f3fb}-\x{1f3ff}\x{e0020}-\x{e007f}]*"
_FLAG, _KEYCAP = r"[\x{1f1e6}-\x{1f1ff}]{1,2}", r"[0-9#*]\x{fe0f}?\x{20e3}"
EMOJI = rf"{_FLAG}|{_KEYCAP}|{_PICTURE}{_DRESS}(?:\x{{200d}}{_PICTURE}{_DRESS})*"
"""A flag, a keycap, or pictures with their variants and skin tones, joined ones as one. RE2 syntax."""


def style_counts(answers: TextColumn) -> dict[str, NDArray[np.int32]]:
    """Return the counts of layout in each answer; `text_features` says what they count."""
    fences = answers.count_matches(FENCE, answers.rows_with("`"))
    return {
        "words": answers.words,
        "newlines": answers.count_at(answers.newlines),
        "bullets": answers.count_matches(BULLET, answers.rows_with_line_start(BULLET_STARTS)),
        "headers": answers.count_matches(HEADER, answers.rows_with("#")),
        "code_blocks": (fences + 1) // 2,
        "bold": answers.count_matches(BOLD, answers.rows_with("*")),
        "emoji": answers.count_matches(EMOJI, answers.not_ascii),
        "digits": answers.count_at(answers.digits),
    }
