"""Texts as sequences of word hashes, many texts at a time: equal for texts that differ in layout only.

A word is a run of letters, digits and marks; whatever stands between words (spaces, line breaks, punctuation) does not
count, nor does case. In scripts without spaces between words each character is a word.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_checks.whole.sketches import finish

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]

BETWEEN, IN_WORD, WORD_ALONE = 0, 1, 2
_SCRIPTS_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x9FFF),  # Han
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)
_BASE = 0x9E3779B97F4A7C15
"""Odd, hence invertible modulo 2^64: a word's hash must not depend on where it stands."""


@dataclass(frozen=True)
class WordRuns:
    """The words of many texts, one after another."""

    hashes: Hashes
    starts: Indices
    """Of each text, its first word; and the end of the last text."""
    characters: Indices
    """Of each text, the characters of its words with one space between them."""

    @property
    def counts(self) -> Indices:
        return np.diff(self.starts)

    def owners(self) -> Indices:
        """Return the text of each word."""
        return np.repeat(np.arange(len(self.starts) - 1), self.counts)

    def sequences(self, length: int) -> tuple[Hashes, Indices]:
        """Return the hash of each sequence of `length` words that lies within one text, and its text."""
        last = len(self.hashes) - length + 1
        if last <= 0:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        owners = self.owners()
        inside = owners[:last] == owners[length - 1 :]
        return self._hashes_between(np.arange(last)[inside], length), owners[:last][inside]

    def wholes(self) -> Hashes:
        """Return the hash of each whole text; that of a text of n words is also the one of its sequence of n words."""
        return self._hashes_between(self.starts[:-1], self.counts)

    def _hashes_between(self, begins: Indices, lengths: int | Indices) -> Hashes:
        powers, inverses = _powers(len(self.hashes) + 1)
        sums = np.zeros(len(self.hashes) + 1, np.uint64)
        np.cumsum(self.hashes * powers[:-1], out=sums[1:])
        found: Hashes = (sums[begins + lengths] - sums[begins]) * inverses[begins]
        # Sequences of different lengths must not meet by chance.
        return finish(found + np.asarray(lengths, np.uint64) * np.uint64(0xD6E8FEB86659FD93))


def word_runs(texts: Sequence[str]) -> WordRuns:
    """Return the words of texts; nothing of it depends on which other texts there are."""
    joined = "\n".join(texts)
    if joined.isascii():
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        codes = np.frombuffer(joined.lower().encode("ascii"), np.uint8)
    else:
        folded = [_fold(text) for text in texts]
        lengths = np.fromiter(map(len, folded), np.int64, len(folded))
        codes = np.frombuffer("\n".join(folded).encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = _kinds()[codes]
    is_first = kinds != BETWEEN
    # A word goes on where letter follows letter.
    is_first[1:] &= (kinds[1:] == WORD_ALONE) | (kinds[:-1] != IN_WORD)
    # It ends before the next character that is no part of it.
    is_last = kinds != BETWEEN
    is_last[:-1] &= (kinds[:-1] == WORD_ALONE) | (kinds[1:] != IN_WORD)
    begins, ends = np.flatnonzero(is_first), np.flatnonzero(is_last) + 1
    powers, inverses = _powers(len(codes) + 1)
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * powers[: len(codes)], out=sums[1:])
    hashes = finish((sums[ends] - sums[begins]) * inverses[begins])
    bounds = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(lengths + 1, out=bounds[1:])
    starts = np.searchsorted(begins, bounds)
    letters = np.zeros(len(begins) + 1, np.int64)
    np.cumsum(ends - begins, out=letters[1:])
    counts = np.diff(starts)
    characters = letters[starts[1:]] - letters[starts[:-1]] + np.maximum(counts - 1, 0)
    return WordRuns(hashes, starts, characters)


def _fold(text: str) -> str:
    """Return a text without case and compatibility forms, a line break for each line separator."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


@lru_cache(maxsize=1)
def _kinds() -> NDArray[np.uint8]:
    """Return what each code point is: between words, in a word, or a word alone."""
    kinds = np.fromiter(
        (unicodedata.category(chr(code))[0] in "LMN" for code in range(0x110000)), np.uint8, 0x110000
    )  # fmt: skip
    for first, last in _SCRIPTS_WITHOUT_SPACES:
        kinds[first : last + 1] *= WORD_ALONE
    return kinds


_cached: list[tuple[Hashes, Hashes]] = []


def _powers(size: int) -> tuple[Hashes, Hashes]:
    """Return the first powers of the base and of its inverse, kept for the next call."""
    if not _cached or len(_cached[0][0]) < size:
        room = max(1 << 16, 1 << (size - 1).bit_length())
        pair = []
        for base in (_BASE, pow(_BASE, -1, 1 << 64)):
            factors = np.full(room, base, np.uint64)
            factors[0] = 1
            pair.append(np.cumprod(factors))
        _cached[:] = [(pair[0], pair[1])]
    powers, inverses = _cached[0]
    return powers[:size], inverses[:size]
