"""What is kept of each prompt to find nearly equal ones: a few numbers instead of its text.

A prompt's shingles are its runs of five characters (a shorter text is one shingle). Each is hashed to 32 bits, and the
distinct hashes are sorted: one random permutation of all shingles there can be, as in one-permutation hashing (Li, Owen
and Zhang, 2012). Two things are read off it:

- The signature: the 128 smallest hashes (a bottom-k sketch, Cohen and Kaplan 2007). Of texts with at most 128 shingles
  it is the whole set and the Jaccard similarity is exact; of longer ones it is estimated with a standard error of
  sqrt(J (1 - J) / 128), which is 0.035 at J = 0.8.
- Sixteen bands, where candidates are looked for. The hashes lie on a circle; a band is the next five of them from one
  of sixteen fixed points. Two texts have a band in common when their union's next five shingles there are shared: with
  probability J^5 (without replacement), so 1 - (1 - J^5)^16 for at least one where the bands do not overlap.

Going round the circle does for short texts what densification (Shrivastava 2017) does for empty bins, without its
repeated values: a band holds five real shingles, also where a prompt has only forty. There bands overlap, and the
curve is the one that the tests measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SHINGLE_CHARACTERS = 5
SIGNATURE_HASHES = 128
NUM_BANDS = 16
BAND_SHINGLES = 5
BANDS = tuple(f"band_{band:02d}" for band in range(NUM_BANDS))
SKETCH_SCHEMA = pa.schema(
    [
        ("group_key", pa.int64()),
        ("num_shingles", pa.int32()),
        *((name, pa.int64()) for name in BANDS),
        ("signature", pa.binary()),
    ]
)
CHARACTERS_AT_ONCE = 1 << 16
"""Arrays of so many numbers stay in the processor's cache."""
PAIRS_IN_CACHE = 1 << 8
"""Pairs that are compared at a time: their hashes stay in the processor's cache."""

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64
)


def sketch(texts: Sequence[str], keys: NDArray[np.int64]) -> pa.Table:
    """Return the sketches of normalised prompt texts.

    Args:
        texts: case folded, whitespace joined (`keys.normalise_text`), each turn on a line of its own.
        keys: of each prompt, its `group_key`.

    Returns:
        One row a text, in order, columns of `SKETCH_SCHEMA`. `signature` is the smallest hashes as little-endian
        32-bit numbers, rising.
    """
    if len(texts) != len(keys):
        raise ValueError(f"{len(texts)} texts with {len(keys)} keys")
    tables = [_sketch_block(texts[start:end], keys[start:end]) for start, end in _blocks(texts)]
    return pa.concat_tables(tables) if tables else SKETCH_SCHEMA.empty_table()


def _blocks(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    start = characters = 0
    for end, text in enumerate(texts):
        if characters and characters + len(text) > CHARACTERS_AT_ONCE:
            yield start, end
            start, characters = end, 0
        characters += len(text) + SHINGLE_CHARACTERS
    if start < len(texts):
        yield start, len(texts)


def _sketch_block(texts: Sequence[str], keys: NDArray[np.int64]) -> pa.Table:
    hashes, counts = shingle_hashes(texts)
    ends = np.cumsum(counts)
    starts = ends - counts
    bands = _bands(hashes, starts, counts)
    arrays = [pa.array(keys, pa.int64()), pa.array(counts.astype(np.int32))]
    arrays += [pa.array(np.ascontiguousarray(column)) for column in bands.T]
    return pa.Table.from_arrays([*arrays, _signatures(hashes, starts, counts)], schema=SKETCH_SCHEMA)


def shingle_hashes(texts: Sequence[str]) -> tuple[NDArray[np.uint32], Indices]:
    """Return the distinct hashes of each text's shingles, rising within each text, and how many each text has."""
    codes, lengths = _codes(texts)
    ends = np.cumsum(lengths)
    owners = np.repeat(np.arange(len(texts), dtype=np.uint64), lengths)
    # The last four characters of a text begin no shingle of it; a text keeps one in any case.
    is_shingle = np.ones(len(codes), bool)
    for back in range(1, SHINGLE_CHARACTERS):
        is_shingle[np.maximum(ends - back, ends - lengths)] = False
    is_shingle[ends - lengths] = True
    mixed = _mix(codes)[is_shingle]
    ordered = np.sort((owners[is_shingle] << np.uint64(32)) | (mixed >> np.uint64(32)))
    is_new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    distinct = ordered[is_new]
    counts = np.bincount((distinct >> np.uint64(32)).astype(np.int64), minlength=len(texts))
    return distinct.astype(np.uint32), counts


def _codes(texts: Sequence[str]) -> tuple[NDArray[np.uint64], Indices]:
    """Return the code points of all texts, one after another, and how many each has; four zeros pad short ones.

    A text of fewer than five characters (none, for an empty one) is padded, so that it is one shingle.
    """
    if any(len(text) < SHINGLE_CHARACTERS for text in texts):
        texts = [text if len(text) >= SHINGLE_CHARACTERS else text.ljust(SHINGLE_CHARACTERS, "\0") for text in texts]
    joined = "".join(texts)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if joined.isascii():
        return np.frombuffer(joined.encode("ascii"), np.uint8).astype(np.uint64), lengths
    # A lone surrogate is a character too: rows with one are not used, but must not stop the check.
    return np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64), lengths


def _mix(codes: NDArray[np.uint64]) -> Hashes:
    """Return a 64-bit hash of the five characters from each place on; the last four places see fewer."""
    size = len(codes)
    mixed = (codes + np.uint64(1)) * _MULTIPLIERS[0]
    for offset in range(1, min(SHINGLE_CHARACTERS, size)):
        mixed[: size - offset] += (codes[offset:] + np.uint64(1)) * _MULTIPLIERS[offset]
    return finish(mixed)


def finish(values: Hashes) -> Hashes:
    """Return values (changed in place) after the finaliser of SplitMix64: every bit depends on every bit."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _bands(hashes: NDArray[np.uint32], starts: Indices, counts: Indices) -> NDArray[np.int64]:
    """Return the sixteen band keys of each text, one row a text.

    A key is the sum of a second hash of the five shingles: sums over a stretch are differences of running sums.
    """
    num_texts = len(counts)
    shift = np.uint32(32 - NUM_BANDS.bit_length() + 1)
    owners = np.repeat(np.arange(num_texts, dtype=np.int64) * NUM_BANDS, counts)
    in_sector = np.bincount(owners + (hashes >> shift).astype(np.int64), minlength=num_texts * NUM_BANDS)
    before = np.cumsum(in_sector).reshape(num_texts, NUM_BANDS) - in_sector.reshape(num_texts, NUM_BANDS)
    sums = np.zeros(len(hashes) + 1, np.uint64)
    np.cumsum(finish(hashes.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)), out=sums[1:])
    length = np.minimum(counts, BAND_SHINGLES)[:, None]
    ends = (starts + counts)[:, None]
    stop = before + length
    over = np.maximum(stop - ends, 0)
    keys = sums[stop - over] - sums[before]
    keys += sums[starts[:, None] + over] - sums[starts][:, None]
    return np.asarray(keys.view(np.int64))


def _signatures(hashes: NDArray[np.uint32], starts: Indices, counts: Indices) -> pa.Array:
    """Return the smallest 128 hashes of each text as bytes."""
    kept = np.minimum(counts, SIGNATURE_HASHES)
    if (counts > SIGNATURE_HASHES).any():
        place = np.arange(len(hashes)) - np.repeat(starts, counts)
        hashes = hashes[place < SIGNATURE_HASHES]
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(kept * 4, out=offsets[1:])
    data = pa.py_buffer(np.ascontiguousarray(hashes, "<u4"))
    return pa.BinaryArray.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(offsets), data])


def similarities(
    first_shingles: pa.Array, second_shingles: pa.Array, first_signatures: pa.Array, second_signatures: pa.Array
) -> NDArray[np.float64]:
    """Return the Jaccard similarity of the texts of each pair.

    Where both texts have at most 128 shingles it is that of the sets of their hashes. Else it is estimated from the
    128 smallest hashes of the union: the share of them that both texts have.
    """
    first, second = _hashes_of(first_signatures), _hashes_of(second_signatures)
    most = np.maximum(first_shingles.to_numpy(), second_shingles.to_numpy())
    blocks = [
        _similarities(first, second, most, start, min(start + PAIRS_IN_CACHE, len(most)))
        for start in range(0, len(most), PAIRS_IN_CACHE)
    ]
    return np.concatenate(blocks) if blocks else np.empty(0)


def _similarities(
    first: tuple[NDArray[np.uint64], NDArray[np.int64]],
    second: tuple[NDArray[np.uint64], NDArray[np.int64]],
    most: NDArray[np.int32],
    start: int,
    end: int,
) -> NDArray[np.float64]:
    """Return `similarities` of the pairs from `start` to `end`.

    Args:
        first: all hashes of the first texts, and where each text's begin (and the last ones end).
        second: those of the second texts.
        most: shingles of the larger text of each pair.
        start: first pair.
        end: after the last one.
    """
    num_pairs = end - start
    numbers = np.arange(num_pairs, dtype=np.uint64) << np.uint64(32)
    marked = [
        np.repeat(numbers, np.diff(offsets[start : end + 1])) | hashes[offsets[start] : offsets[end]]
        for hashes, offsets in (first, second)
    ]
    ordered = np.concatenate(marked)
    ordered.sort()
    is_again = ordered[1:] == ordered[:-1]
    # How many distinct hashes, and how many repeated ones (a hash of both texts), lie before each place.
    repeated = np.zeros(len(ordered) + 1, np.int64)
    np.cumsum(is_again, out=repeated[2:])
    distinct = np.arange(len(ordered) + 1) - repeated
    bounds = np.searchsorted(ordered, np.arange(num_pairs + 1, dtype=np.uint64) << np.uint64(32))
    begins, ends = bounds[:-1], bounds[1:]
    limits = distinct[ends] - distinct[begins]
    limits = np.where(most[start:end] > SIGNATURE_HASHES, np.minimum(limits, SIGNATURE_HASHES), limits)
    last = np.minimum(np.searchsorted(distinct, distinct[begins] + limits, side="right") - 1, ends)
    return np.asarray((repeated[last] - repeated[begins]) / np.maximum(limits, 1), np.float64)


def _hashes_of(signatures: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the hashes in an array of signatures, one after another, and where each signature's begin and end."""
    offsets = np.frombuffer(signatures.buffers()[1], np.int32)
    offsets = offsets[signatures.offset : signatures.offset + len(signatures) + 1].astype(np.int64)
    data = np.frombuffer(signatures.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data.view("<u4").astype(np.uint64), (offsets - offsets[0]) // 4
