"""Evaluation prompts inside training texts: whole or in good part, whatever the line breaks and punctuation.

A training text is contaminated by an evaluation prompt

- when at least a share of the prompt's distinct sequences of n words occurs in it. The share is of the evaluation's
  sequences, not of the text's: a prompt embedded in a long document counts in full (as in Tulu 3's decontamination,
  arXiv 2411.15124, section 3.2; sequences there are 8 words too);
- or, for a prompt of fewer than n words, when it is the whole text, or stands in it and has 50 characters at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_checks.config import Contamination
from data_checks.whole.word_runs import Hashes, Indices, WordRuns, word_runs

MIN_CHARACTERS = 50
"""Shorter prompts of few words stand in many texts by chance."""
CHARACTERS_AT_ONCE = 1 << 17
ENTRIES_AT_ONCE = 1 << 20
MAX_FILTER_BITS = 27


@dataclass(frozen=True)
class HashSet:
    """Sorted distinct hashes, with a table by which most others are told apart without a search."""

    values: Hashes
    table: NDArray[np.bool_]

    @classmethod
    def of(cls, values: Hashes) -> Self:
        distinct = np.unique(values)
        # Sixteen places for each value: one in sixteen others needs a search.
        bits = min(MAX_FILTER_BITS, max(10, (16 * len(distinct)).bit_length()))
        table = np.zeros(1 << bits, bool)
        table[(distinct & np.uint64(len(table) - 1)).astype(np.int64)] = True
        return cls(distinct, table)

    def find(self, hashes: Hashes) -> tuple[Indices, Indices]:
        """Return the places of the hashes that are in the set, and which of its values they are."""
        if not len(self.values) or not len(hashes):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        likely = np.flatnonzero(self.table[(hashes & np.uint64(len(self.table) - 1)).view(np.int64)])
        where = np.minimum(np.searchsorted(self.values, hashes[likely]), len(self.values) - 1)
        found = self.values[where] == hashes[likely]
        return likely[found], where[found]


@dataclass(frozen=True)
class EvaluationIndex:
    """The evaluation's prompts as hashes: small, picklable, without text."""

    ngram_words: int
    ngrams: HashSet
    """The sequences of all prompts that have enough words."""
    members: Indices
    """Their sequences (places in `ngrams`), one prompt after another."""
    bounds: Indices
    """Where each of these prompts' members begin; and the end."""
    needed: Indices
    """How many of a prompt's sequences a text must have."""
    telling: Indices
    """Prompts by sequence: whoever has enough of a prompt's sequences has one of its telling (rarest) ones."""
    telling_bounds: Indices
    """Of each value of `ngrams`, where its prompts in `telling` begin; and the end."""
    wholes: HashSet
    """Short prompts that count when they are the whole text."""
    embedded: tuple[tuple[int, HashSet], ...]
    """(number of words, prompts of so many) of the short prompts that count wherever they stand."""

    @classmethod
    def of(cls, texts: Sequence[str], config: Contamination) -> Self:
        """Prepare the prompts of an evaluation.

        Args:
            texts: one each; its turns joined by line breaks. What has no word is left out.
            config: length of word sequences, and the share of them that contaminates.
        """
        runs = word_runs(texts)
        hashes, owners = runs.sequences(config.ngram_words)
        ngrams = HashSet.of(hashes)
        # Each prompt's distinct sequences, prompts in order.
        distinct = np.unique(owners * max(len(ngrams.values), 1) + np.searchsorted(ngrams.values, hashes))
        owners, members = np.divmod(distinct, max(len(ngrams.values), 1))
        _, begins, sizes = np.unique(owners, return_index=True, return_counts=True)
        needed = np.maximum(np.ceil(sizes * config.containment - 1e-9).astype(np.int64), 1)
        prompts = np.repeat(np.arange(len(sizes)), sizes)
        telling, telling_bounds = _telling(prompts, members, sizes - needed + 1, len(ngrams.values))
        return cls(
            config.ngram_words, ngrams, members, np.append(begins, len(members)), needed, telling, telling_bounds,
            *_short_prompts(runs, config.ngram_words),
        )  # fmt: skip

    def hits(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        """Return which texts hold a prompt of the evaluation.

        Args:
            texts: prompts and answers of training rows, one text each. What a text says does not depend on the others.
        """
        found = np.zeros(len(texts), bool)
        if not len(self.ngrams.values) and not len(self.wholes.values):
            return found
        for start, end in _blocks(texts):
            runs = word_runs(texts[start:end])
            place, _ = self.wholes.find(runs.wholes())
            found[start + place] = True
            for length, prompts in self.embedded:
                hashes, owners = runs.sequences(length)
                found[start + owners[prompts.find(hashes)[0]]] = True
            found[start + self._containing(*runs.sequences(self.ngram_words))] = True
        return found

    def _containing(self, hashes: Hashes, owners: Indices) -> Indices:
        """Return the texts that have enough of a prompt's sequences."""
        place, ngram = self.ngrams.find(hashes)
        if not len(place):
            return np.empty(0, np.int64)
        width = len(self.ngrams.values)
        present = np.unique(owners[place] * width + ngram)
        text, ngram = np.divmod(present, width)
        # Candidates: a text with one of a prompt's telling sequences.
        counts = self.telling_bounds[ngram + 1] - self.telling_bounds[ngram]
        hits: list[Indices] = []
        for first, last in _parts(counts):
            prompt = self.telling[_ranges(self.telling_bounds[ngram[first:last]], counts[first:last])]
            pairs = np.unique(np.repeat(text[first:last], counts[first:last]) * len(self.needed) + prompt)
            hits.append(self._verified(*np.divmod(pairs, len(self.needed)), present, width))
        return np.unique(np.concatenate(hits))

    def _verified(self, text: Indices, prompt: Indices, present: Indices, width: int) -> Indices:
        """Return the texts of those candidates that have enough sequences."""
        sizes = self.bounds[prompt + 1] - self.bounds[prompt]
        hits: list[Indices] = [np.empty(0, np.int64)]
        for first, last in _parts(sizes):
            some = sizes[first:last]
            wanted = self.members[_ranges(self.bounds[prompt[first:last]], some)]
            wanted += np.repeat(text[first:last], some) * width
            where = np.minimum(np.searchsorted(present, wanted), len(present) - 1)
            shared = np.add.reduceat((present[where] == wanted).astype(np.int64), np.cumsum(some) - some)
            hits.append(text[first:last][shared >= self.needed[prompt[first:last]]])
        return np.concatenate(hits)


def _telling(prompts: Indices, members: Indices, wanted: Indices, num_ngrams: int) -> tuple[Indices, Indices]:
    """Return, by sequence, the prompts for which it is among the rarest.

    Of s sequences of which k must occur, at least one of any s - k + 1 occurs: it is enough to look for these.

    Args:
        prompts: of each member, rising.
        members: sequences of each prompt.
        wanted: of each prompt, how many to take.
        num_ngrams: number of different sequences.
    """
    frequency = np.bincount(members, minlength=num_ngrams)
    order = np.lexsort((members, frequency[members], prompts))
    sizes = np.bincount(prompts, minlength=len(wanted))
    rank = np.arange(len(members)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken = order[rank < wanted[prompts]]
    ngrams, owners = members[taken], prompts[taken]
    by_ngram = np.lexsort((owners, ngrams))
    return owners[by_ngram], np.searchsorted(ngrams[by_ngram], np.arange(num_ngrams + 1))


def _short_prompts(runs: WordRuns, ngram_words: int) -> tuple[HashSet, tuple[tuple[int, HashSet], ...]]:
    wholes = runs.wholes()
    is_short = (runs.counts > 0) & (runs.counts < ngram_words)
    is_long_enough = is_short & (runs.characters >= MIN_CHARACTERS)
    lengths = np.unique(runs.counts[is_long_enough]).tolist()
    embedded = tuple((n, HashSet.of(wholes[is_long_enough & (runs.counts == n)])) for n in lengths)
    return HashSet.of(wholes[is_short]), embedded


def _blocks(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of blocks of texts that fit the processor's cache; a long text is a block alone."""
    start = characters = 0
    for end, text in enumerate(texts):
        if characters and characters + len(text) > CHARACTERS_AT_ONCE:
            yield start, end
            start, characters = end, 0
        characters += len(text) + 1
    if start < len(texts):
        yield start, len(texts)


def _parts(counts: Indices) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of stretches with about a million entries in all."""
    totals = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = totals[start] - counts[start]
        end = max(start + 1, int(np.searchsorted(totals, before + ENTRIES_AT_ONCE, side="right")))
        yield start, end
        start = end


def _ranges(begins: Indices, counts: Indices) -> Indices:
    """Return the numbers of each range `begin, begin + 1, ...` of so many, one after another."""
    ends = np.cumsum(counts)
    offsets = np.repeat(begins - ends + counts, counts)
    return np.asarray(offsets + np.arange(len(offsets)), np.int64)
