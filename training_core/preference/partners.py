"""The next row that fits and belongs to another group, for all rows at once.

Rows stand at the leaves of a binary tree. Each block of it, 2^k rows from a multiple of 2^k on, knows its smallest
length and the smallest one of any other group than that one's. So one look says whether a block holds a row that fits
and is of another group, whatever the group, and a search takes a number of looks that grows as log N, not as N.

Shapes: N rows, P the power of two that they fit into.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NO_LENGTH = np.iinfo(np.int64).max
"""Where there is no row: it fits nowhere."""


@dataclass(frozen=True)
class Blocks:
    """One level of the tree."""

    smallest: Integers
    """Smallest length in each block."""
    group: Integers
    """The group of that row."""
    smallest_other: Integers
    """Smallest length of a row of any other group."""

    def hold(self, places: Integers, rooms: Integers, groups: Integers) -> NDArray[np.bool_]:
        """Return whether each of the blocks has a row of another group than `groups` that is at most `rooms` long."""
        other = np.where(self.group[places] == groups, self.smallest_other[places], self.smallest[places])
        return other <= rooms

    def joined(self) -> Blocks:
        """Return the level above, of blocks twice as large."""
        left, right = self.smallest[::2], self.smallest[1::2]
        is_left = left <= right
        group = np.where(is_left, self.group[::2], self.group[1::2])
        lost = np.where(is_left, right, left)
        lost_group = np.where(is_left, self.group[1::2], self.group[::2])
        other_of_lost = np.where(is_left, self.smallest_other[1::2], self.smallest_other[::2])
        other_of_won = np.where(is_left, self.smallest_other[::2], self.smallest_other[1::2])
        smallest_other = np.minimum(np.where(lost_group == group, other_of_lost, lost), other_of_won)
        return Blocks(np.where(is_left, left, right), group, smallest_other)


def tree_of(lengths: Integers, groups: Integers) -> list[Blocks]:
    """Return the levels of the tree, single rows first and the whole last."""
    size = 1 << (len(lengths) - 1).bit_length()
    smallest, group = np.full(size, NO_LENGTH), np.full(size, -1, np.int64)
    smallest[: len(lengths)], group[: len(lengths)] = lengths, groups
    levels = [Blocks(smallest, group, np.full(size, NO_LENGTH))]
    while len(levels[-1].group) > 1:
        levels.append(levels[-1].joined())
    return levels


def first_from(levels: list[Blocks], starts: Integers, rooms: Integers, groups: Integers) -> Integers:
    """Return for each search the first row from `starts` on that fits into its room and is of another group than its
    own; -1 where there is none."""
    top = len(levels) - 1
    places, level_of = starts.copy(), np.full(len(starts), -1)
    # Up: over blocks without such a row, each as large as the place where it starts allows.
    for level, blocks in enumerate(levels):
        size = 1 << level
        is_here = (level_of < 0) & ((places & size != 0) | (level == top)) & (places < 1 << top)
        here = np.flatnonzero(is_here)
        is_found = blocks.hold(places[here] >> level, rooms[here], groups[here])
        level_of[here[is_found]] = level
        places[here[~is_found]] += size
    found = np.flatnonzero(level_of >= 0)
    # Down: into the left half where it has one, else into the right.
    for level in range(top, 0, -1):
        here = found[level_of[found] == level]
        is_left = levels[level - 1].hold(places[here] >> (level - 1), rooms[here], groups[here])
        places[here[~is_left]] += 1 << (level - 1)
        level_of[here] = level - 1
    return np.where(level_of == 0, places, -1)


def next_fitting(lengths: Integers, rooms: Integers, groups: Integers) -> Integers:
    """Return for each row the next one, the first after the last, that fits into its room and is of another group.

    Args:
        lengths: int64 [N], tokens.
        rooms: int64 [N], tokens that each row has room for.
        groups: int64 [N], from 0.

    Returns:
        int64 [N], rows; -1 where none fits.

    >>> next_fitting(np.array([2, 5, 1]), np.array([4, 2, 4]), np.array([0, 1, 2])).tolist()
    [2, 2, 0]
    """
    levels = tree_of(lengths, groups)
    found = first_from(levels, np.arange(1, len(lengths) + 1), rooms, groups)
    rest = np.flatnonzero(found < 0)
    found[rest] = first_from(levels, np.zeros(len(rest), np.int64), rooms[rest], groups[rest])
    return found
