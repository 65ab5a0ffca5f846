"""Prompts that are nearly the same, or depths of one dialogue, as clusters that no split tears apart.

Candidates come from the bands of `sketches`; each is checked by the similarity of its signatures, so a pair below the
limit never joins two prompts. Within a band's bucket of m prompts only 2 m pairs are looked at (with the next member
and with the first), which is enough to connect it. A bucket of more than ten is what a template makes; there, only
prompts that have the following bands in common too are paired, until the buckets are small.

Joining is by single linkage: A near B and B near C puts all three together, though A and C may be further apart,
since otherwise B and C could end on two sides of the split. That chains in data made from templates, so a cluster is
bounded: pairs join strongest first, and no join makes a cluster larger than a hundredth of the prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_checks.whole.sketches import BANDS, finish, similarities
from data_checks.whole.store import columns, number, parquet_source

if TYPE_CHECKING:
    import duckdb

CLUSTER_SCHEMA = pa.schema([("group_key", pa.int64()), ("cluster_key", pa.int64())])
MAX_CLUSTER_FRACTION = 0.01
"""Largest cluster, as a share of the prompts: a validation split of a tenth then misses its size by a tenth at most."""
MIN_MAX_CLUSTER = 20
"""Largest cluster of a small data set, in prompts."""
NUMBERS_AT_ONCE = 32_000_000
"""Band keys (8 bytes each) that are held at a time, but at least two bands."""
LARGE_BUCKET = 10
"""Larger buckets are what templates make: there, prompts must have the next band in common too."""
PAIRS_AT_ONCE = 1 << 15
"""Pairs whose signatures are read at a time: at most 34 MB."""
TABLE_BITS = (1 << 22) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
EDGES_AT_ONCE = 1 << 18

Keys = NDArray[np.int64]


def cluster_prompts(
    connection: duckdb.DuckDBPyConnection,
    sketches: Sequence[Path],
    prefixes: Sequence[Path],
    similarity: float | None,
) -> pa.Table:
    """Return which prompts belong together.

    Besides, it makes the table `near_pairs` (first_key, second_key, strength): the pairs that connect them. `strength`
    is the Jaccard similarity of near-duplicates, and above 1 for a prompt and its continuation.

    Args:
        connection: has a table `groups` with the `group_key` of each prompt that counts, each once.
        sketches: Parquet files of `sketches.sketch`; a prompt may occur in several.
        prefixes: Parquet files (group_key, prefix_key): of prompts with several turns, the keys of the shorter prompts
            that they begin with.
        similarity: Jaccard similarity (above 0.5, up to 1) from which on two prompts belong together; None: only
            dialogues do.

    Returns:
        Columns `group_key` and `cluster_key` (the smallest group key of the cluster), sorted. A prompt that belongs to
        no other is not in it.
    """
    connection.execute("create or replace table near_pairs (first_key bigint, second_key bigint, strength double)")
    if similarity is not None and sketches:
        _find_near_pairs(connection, sketches, similarity)
    if prefixes:
        _find_continuations(connection, prefixes)
    first, second = columns(
        connection, "select first_key, second_key from near_pairs order by strength desc, first_key, second_key"
    )
    num_prompts = number(connection, "select count(*) from groups")
    limit = max(MIN_MAX_CLUSTER, int(num_prompts * MAX_CLUSTER_FRACTION))
    return clusters_of(first, second, limit)


def clusters_of(first: Keys, second: Keys, max_size: int) -> pa.Table:
    """Return the clusters that pairs connect.

    Args:
        first: one key of each pair, strongest pair first.
        second: the other.
        max_size: a pair that would make a larger cluster connects nothing.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if not len(first):
        return CLUSTER_SCHEMA.empty_table()
    keys = np.unique(np.concatenate([first, second]))
    one, two = (np.searchsorted(keys, side).astype(np.int32) for side in (first, second))
    graph = coo_array((np.ones(len(one), np.int8), (one, two)), shape=(len(keys), len(keys)))
    _, labels = connected_components(graph, directed=False)
    # Nodes are numbered by rising key: the first node of a label is its smallest key.
    _, firsts = np.unique(labels, return_index=True)
    roots = firsts[labels]
    too_large = (np.bincount(labels) > max_size)[labels]
    if too_large.any():
        inside = too_large[one]
        joined = _join_strongest_first(len(keys), one[inside], two[inside], max_size)
        roots = np.where(too_large, joined, roots)
    is_joined = np.bincount(roots, minlength=len(keys))[roots] > 1
    return pa.table([keys[is_joined], keys[roots[is_joined]]], schema=CLUSTER_SCHEMA)


def _join_strongest_first(
    num_nodes: int, first: NDArray[np.int32], second: NDArray[np.int32], max_size: int
) -> NDArray[np.int64]:
    """Join the clusters of each pair in turn, unless that is too large; return each node's smallest companion."""
    parent = array("q", range(num_nodes))
    size = array("q", [1]) * num_nodes

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for start in range(0, len(first), EDGES_AT_ONCE):
        some = slice(start, start + EDGES_AT_ONCE)
        for one, two in zip(first[some].tolist(), second[some].tolist(), strict=True):
            low, high = root(one), root(two)
            if low == high or size[low] + size[high] > max_size:
                continue
            low, high = min(low, high), max(low, high)
            parent[high] = low
            size[low] += size[high]
    # A parent is never larger than its child: one pass in order reaches every root.
    for node in range(num_nodes):
        parent[node] = parent[parent[node]]
    return np.array(parent, np.int64)


def _find_near_pairs(connection: duckdb.DuckDBPyConnection, sketches: Sequence[Path], similarity: float) -> None:
    """Add the candidates that are similar enough to `near_pairs`."""
    source = parquet_source(sketches)
    (keys,) = columns(connection, f"select group_key from {source}")
    counted = _first_of_each(keys, columns(connection, "select group_key from groups")[0])
    connection.execute("create or replace table candidates (first_key bigint, second_key bigint)")
    # By what counts, not by what is read: what is found must not depend on how rows lie in files.
    at_once = max(2, min(len(BANDS), NUMBERS_AT_ONCE // max(len(counted), 1)))
    for start in range(0, len(BANDS), at_once):
        bands = _read_bands(connection, source, BANDS[start : start + at_once], counted)
        for first in range(len(bands)):
            _add_candidates(connection, keys[counted], bands, first)
    _verify(connection, source, similarity)
    connection.execute("drop table candidates")


def _read_bands(
    connection: duckdb.DuckDBPyConnection, source: str, names: Sequence[str], counted: NDArray[np.int64]
) -> list[Keys]:
    """Return some bands of the sketches that count."""
    num_rows = number(connection, f"select count(*) from {source}")
    at_once = max(1, NUMBERS_AT_ONCE // max(num_rows, 1))
    bands: list[Keys] = []
    for start in range(0, len(names), at_once):
        read = columns(connection, f"select {', '.join(names[start : start + at_once])} from {source}")
        bands += [band[counted] for band in read]
    return bands


def _first_of_each(keys: Keys, wanted: Keys) -> NDArray[np.int64]:
    """Return the place of the first occurrence of each key that is wanted, rising."""
    distinct, firsts = np.unique(keys, return_index=True)
    wanted = np.sort(wanted)
    place = np.minimum(np.searchsorted(wanted, distinct), max(len(wanted) - 1, 0))
    found = wanted[place] == distinct if len(wanted) else np.zeros(len(distinct), bool)
    return np.sort(firsts[found])


def _add_candidates(connection: duckdb.DuckDBPyConnection, keys: Keys, bands: Sequence[Keys], first: int) -> None:
    """Pair the prompts that have a band in common: each with the next one and with the smallest of the bucket.

    Args:
        connection: has the table `candidates`.
        keys: of the prompts.
        bands: some of their bands, an entry a prompt.
        first: which of these bands to look at; the following ones tell apart what falls into a large bucket.
    """
    members, buckets = _buckets(bands[first])
    for further in range(1, len(bands)):
        if not len(members):
            return
        large = np.flatnonzero(np.bincount(buckets)[buckets] > LARGE_BUCKET)
        if not len(large):
            break
        following = bands[(first + further) % len(bands)][members[large]]
        mixed = finish(buckets[large].view(np.uint64) * _GOLDEN + following.view(np.uint64)).view(np.int64)
        kept, parts = _buckets(mixed)
        others = np.setdiff1d(np.arange(len(members)), large, assume_unique=True)
        members = np.concatenate([members[others], members[large[kept]]])
        buckets = np.unique(np.concatenate([buckets[others], parts + len(keys)]), return_inverse=True)[1]
    order = np.lexsort((keys[members], buckets))
    buckets, keys = buckets[order], keys[members[order]]
    begins = np.ones(len(keys), bool)
    begins[1:] = buckets[1:] != buckets[:-1]
    smallest = keys[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    inside = np.flatnonzero(~begins)
    pairs = np.concatenate(
        [np.stack([keys[inside - 1], keys[inside]]), np.stack([smallest[inside], keys[inside]])], axis=1
    )
    connection.register("new_candidates", pa.table({"first_key": pairs[0], "second_key": pairs[1]}))
    connection.execute("insert into candidates select distinct * from new_candidates")
    connection.unregister("new_candidates")


def _buckets(values: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of values that occur more than once, and a number for each such value, from 0."""
    ordered = np.sort(values)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # Most of the others are told apart by their last bits, without a search.
    is_likely = np.zeros(TABLE_BITS + 1, bool)
    is_likely[repeated & TABLE_BITS] = True
    members = np.flatnonzero(is_likely[values & TABLE_BITS])
    place = np.minimum(np.searchsorted(repeated, values[members]), len(repeated) - 1)
    found = repeated[place] == values[members]
    return members[found], place[found]


def _verify(connection: duckdb.DuckDBPyConnection, source: str, similarity: float) -> None:
    """Add the candidates whose signatures are similar enough, batch by batch."""
    # Sets of a and b members have a similarity of min(a, b) / max(a, b) at most.
    bound = (
        f"least(a.num_shingles, b.num_shingles) >= {similarity!r}::double * greatest(a.num_shingles, b.num_shingles)"
    )
    connection.execute(
        "create or replace table sketched as select group_key, any_value(num_shingles) as num_shingles, "
        f"any_value(signature) as signature from {source} where group_key in "
        "(select first_key from candidates union select second_key from candidates) group by 1"
    )
    reader = connection.cursor().sql(
        "select c.first_key, c.second_key, a.num_shingles as first_shingles, b.num_shingles as second_shingles, "
        "a.signature as first_signature, b.signature as second_signature from (select distinct * from candidates) c "
        "join sketched a on a.group_key = c.first_key join sketched b on b.group_key = c.second_key "
        f"where {bound}"
    )  # fmt: skip
    for batch in reader.to_arrow_reader(PAIRS_AT_ONCE):
        measured = similarities(*(batch.column(index) for index in range(2, 6)))
        near = measured >= similarity
        found = pa.table(
            [batch.column(0).filter(near), batch.column(1).filter(near), measured[near]],
            names=["first_key", "second_key", "strength"],
        )
        connection.register("new_pairs", found)
        connection.execute("insert into near_pairs select * from new_pairs")
        connection.unregister("new_pairs")
    connection.execute("drop table sketched")


def _find_continuations(connection: duckdb.DuckDBPyConnection, prefixes: Sequence[Path]) -> None:
    """Add each prompt with the longest shorter prompt that it continues to `near_pairs`.

    A dialogue of ten depths is a chain of nine such pairs; a greeting that a thousand dialogues open with is a star. A
    pair's strength is 1 + 1 / (number of prompts that continue the shorter one directly), so that where a cluster
    becomes too large, dialogues stay whole and greetings let go first.
    """
    connection.execute(
        "insert into near_pairs with known as (select distinct group_key, prefix_key from "
        f"{parquet_source(prefixes)} where group_key in (select group_key from groups)), "
        # Longer prompts have more prefixes: the longest prefix is the one with most of its own.
        "depths as (select group_key, count(*) as depth from known group by 1), "
        "parents as (select k.group_key, max_by(k.prefix_key, (coalesce(d.depth, 0), k.prefix_key)) as prefix_key "
        "from known k left join depths d on d.group_key = k.prefix_key "
        "where k.prefix_key in (select group_key from groups) group by 1), "
        "children as (select prefix_key, count(*) as number from parents group by 1) "
        "select least(p.group_key, p.prefix_key), greatest(p.group_key, p.prefix_key), 1 + 1.0 / c.number "
        "from parents p join children c using (prefix_key) where p.group_key <> p.prefix_key"
    )
