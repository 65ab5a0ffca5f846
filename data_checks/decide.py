"""Pass 2: what needs all rows at once. Numbers and keys only; texts stay on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_checks.config import CheckDataConfig
from data_checks.examine import Chunk
from data_checks.result import INPUT_TABLES, Numbers
from data_checks.rows import Policy, Reason
from data_checks.splits import side_sql

if TYPE_CHECKING:
    import duckdb

FOUND_SCHEMA = pa.schema(
    [("example", pa.int64()), ("reason", pa.string()), ("policy", pa.string()), ("detail", pa.string())]
)
JUDGED_TABLES = ("preferences", "feedback")
"""Kinds of input that are split into training and validation."""


@dataclass
class Decisions:
    """What became of each example, beyond what was known when it was read."""

    found: pa.Table
    """Examples that are not used after all, sorted by number: why, and in what words."""
    groups: NDArray[np.int64]
    """Keys of the prompts that are used, sorted."""
    clusters: NDArray[np.int64]
    """Of each group, the key of the cluster of nearly equal prompts it belongs to: the smallest key of a member."""
    is_validation: NDArray[np.bool_]
    """Of each group, its side."""
    train_prompts: NDArray[np.int64]
    """The examples that hold the first occurrence of a training prompt, sorted; likewise of validation."""
    validation_prompts: NDArray[np.int64]
    fingerprint: str
    numbers: Numbers = field(default_factory=dict)


def sides_of(groups: NDArray[np.int64], decisions: Decisions) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return for each group key the key of its cluster (its own where it is in none), and whether that is held out."""
    if not len(decisions.groups):
        return groups, np.zeros(len(groups), np.bool_)
    at = np.minimum(np.searchsorted(decisions.groups, groups), len(decisions.groups) - 1)
    known = decisions.groups[at] == groups
    return np.where(known, decisions.clusters[at], groups), known & decisions.is_validation[at]


class Store:
    """The features of all examples in a database that spills to disk."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, chunks: Sequence[Chunk]) -> None:
        self.connection = connection
        self.tables = [name for name in INPUT_TABLES if any(chunk.table == name for chunk in chunks)]
        connection.execute("create table found (example bigint, reason varchar, policy varchar, detail varchar)")
        for name in self.tables:
            self._register(f"read_{name}", [chunk.features for chunk in chunks if chunk.table == name])
            # A row with a finding counts for nothing from then on.
            connection.execute(
                f"create view {name} as select r.* from read_{name} r anti join found f on r.example = f.example "
                "where r.usable"
            )

    def _register(self, name: str, paths: Sequence[Path]) -> None:
        from data_checks.whole.store import register

        register(self.connection, name, paths)

    def mark(self, rows: pa.Table | str) -> None:
        """Take examples out.

        Args:
            rows: columns of `found`, or a query that gives them.
        """
        if isinstance(rows, str):
            self.connection.execute(f"insert into found {rows}")
            return
        self.connection.register("new_rows", rows.select(FOUND_SCHEMA.names))
        self.connection.execute("insert into found select * from new_rows")
        self.connection.unregister("new_rows")

    def judged_again(self, table: str) -> str:
        """Return the name of a view of the usable rows that ask for the same judgement as another one does."""
        from data_checks.whole.duplicates import judged_again

        # Laid down once, since few rows are left: what is marked later leaves the view, not the table.
        self.connection.execute(f"create table repeated_{table} as {judged_again(table)}")
        self.connection.execute(
            f"create view again_{table} as select r.* from repeated_{table} r "
            "anti join found f on r.example = f.example"
        )
        return f"again_{table}"

    def number(self, query: str) -> Any:
        # All of it: a result that is not read to its end keeps the connection busy.
        ((value,),) = self.connection.execute(query).fetchall()
        return value

    def has(self, table: str) -> bool:
        return table in self.tables


def decide(
    connection: duckdb.DuckDBPyConnection, chunks: Sequence[Chunk], config: CheckDataConfig, seed: int
) -> Decisions:
    """Apply what needs all rows. The order matters: what is held out is known before what may be trained on.

    Args:
        connection: an empty database that may spill to the work folder.
        chunks: of all files, in order.
        config: policies and limits.
        seed: of the split.
    """
    store = Store(connection, chunks)
    numbers: Numbers = {}
    fingerprint = dataset_fingerprint(store)
    mark_repeated_prompts(store, "eval_prompts")
    numbers |= make_clusters(store, chunks, config)
    hold_out(store)
    numbers |= mark_repeats(store, config)
    make_sides(store, config.validation_fraction, seed)
    numbers |= count_leaks(store)
    make_evaluation_groups(store)
    hold_out_rl_prompts(store)
    mark_repeated_prompts(store, "rl_prompts")
    return _decisions(store, fingerprint, numbers)


def dataset_fingerprint(store: Store) -> str:
    """Return a SHA-256 over every pair and judged answer that could be read, used or not.

    It does not depend on the order of rows nor on how they are spread over files or stored in them.
    """
    import hashlib

    names = [name for name in (*JUDGED_TABLES, "stepwise") if store.has(name)] or store.tables
    union = " union all ".join(
        f"select content_hash, content_hash_2 from read_{name} where content_hash is not null" for name in names
    )
    digest = hashlib.sha256()
    reader = store.connection.sql(f"select * from ({union}) order by 1, 2").to_arrow_reader(1 << 20)
    for batch in reader:
        words = np.stack([column.to_numpy() for column in batch.columns], axis=1)
        digest.update(words.astype("<i8").tobytes())
    return digest.hexdigest()


def mark_repeated_prompts(store: Store, table: str) -> None:
    """Take out each prompt whose text or id an earlier usable prompt of the same file has."""
    if not store.has(table):
        return
    found = store.connection.execute(
        # What stands once repeats nothing, and in most files is nearly all there is.
        "with again as (select example, row, prompt_key, prompt_id_key, "
        "count(*) over (partition by prompt_key) as texts, "
        f"count(prompt_id_key) over (partition by prompt_id_key) as ids from {table}) "
        "select example, row, prompt_key, prompt_id_key from again where texts > 1 or ids > 1 order by example"
    ).fetchnumpy()
    seen: tuple[dict[int, int], dict[int, int]] = ({}, {})
    repeated: list[tuple[int, str]] = []
    columns = [found[name].tolist() for name in ("example", "row", "prompt_key", "prompt_id_key")]
    for example, row, prompt, prompt_id in zip(*columns, strict=True):
        if (first := seen[0].get(prompt)) is not None:
            repeated.append((example, f"the prompt repeats row {first}"))
        elif (first := seen[1].get(prompt_id)) is not None:
            repeated.append((example, f"the prompt_id repeats row {first}"))
        else:
            seen[0][prompt] = seen[1][prompt_id] = row
    store.mark(
        found_table([example for example, _ in repeated], Reason.DUPLICATE_PROMPT, [text for _, text in repeated])
    )


def found_table(examples: Sequence[int] | NDArray[np.int64], reason: Reason, details: Sequence[str] | str) -> pa.Table:
    """Return rows of `found` for one reason."""
    size = len(examples)
    texts = [details] * size if isinstance(details, str) else details
    arrays = [pa.array(examples, pa.int64()), pa.array([reason.value] * size, pa.string()), pa.nulls(size, pa.string())]
    return pa.Table.from_arrays([*arrays, pa.array(texts, pa.string())], schema=FOUND_SCHEMA)


def make_clusters(store: Store, chunks: Sequence[Chunk], config: CheckDataConfig) -> Numbers:
    """Make the table `clusters` (group_key, cluster_key): prompts that are nearly the same, or one dialogue's depths.

    A prompt that stands alone is not in it. Only prompts of usable rows count.
    """
    from data_checks.whole.near_duplicates import cluster_prompts

    usable = " union all ".join(f"select group_key, group_key_2 from {name}" for name in store.tables)
    store.connection.execute(
        f"create table groups as select group_key, min(group_key_2) as group_key_2 from ({usable}) group by 1"
    )
    sketches = [chunk.sketches for chunk in chunks if chunk.sketches is not None]
    prefixes = [chunk.prefixes for chunk in chunks if chunk.prefixes is not None]
    similarity = None if config.near_duplicates is None else config.near_duplicates.similarity
    clusters = cluster_prompts(store.connection, sketches, prefixes, similarity)
    store.connection.register("found_clusters", clusters)
    store.connection.execute("create table clusters as select * from found_clusters")
    store.connection.unregister("found_clusters")
    num_groups = store.number("select count(*) from groups")
    in_clusters = store.number("select count(*) from clusters")
    num_clusters = store.number("select count(distinct cluster_key) from clusters")
    return {
        "num_prompts": num_groups,
        "near_duplicate_prompts_fraction": (in_clusters - num_clusters) / num_groups if num_groups else 0.0,
    }


def hold_out(store: Store) -> None:
    """Take out pairs and feedback whose prompt is an evaluation prompt, or nearly one."""
    if not store.has("eval_prompts"):
        return
    store.connection.execute("create table held_out as select distinct group_key from eval_prompts")
    for name in JUDGED_TABLES:
        if store.has(name):
            _hold_out(store, name)


def _hold_out(store: Store, table: str) -> None:
    """Take out the rows of a table whose prompt is in `held_out`, or in a cluster with one that is."""
    same, near = "the prompt is an evaluation prompt", "the prompt is nearly an evaluation prompt"
    reason = Reason.PROMPT_IN_EVALUATION.value
    store.mark(
        f"select example, '{reason}', null, '{same}' from {table} where group_key in (select group_key from held_out)"
    )
    # A cluster is bounded, so a prompt may also be near one of another cluster.
    neighbours = " union ".join(
        f"select {one} from near_pairs where strength <= 1 and {other} in (select group_key from held_out)"
        for one, other in (("first_key", "second_key"), ("second_key", "first_key"))
    )
    store.mark(
        f"select t.example, '{reason}', null, '{near}' from {table} t left join clusters c using (group_key) "
        "where c.cluster_key in (select cluster_key from clusters where group_key in (select group_key from held_out)) "
        f"or t.group_key in ({neighbours})"
    )


def mark_repeats(store: Store, config: CheckDataConfig) -> Numbers:
    """Take out what contradicts or repeats another row, and what is above a cap, as far as the config says so."""
    from data_checks.whole.duplicates import annotator_agreement, find_conflicts, find_cycles, find_duplicates, over_cap

    numbers: Numbers = {}
    conflicting = {"preferences": Reason.CONFLICTING_PAIR, "feedback": Reason.CONFLICTING_LABELS}
    repeated = {"preferences": Reason.DUPLICATE_PAIR, "feedback": Reason.DUPLICATE_FEEDBACK}
    for name in JUDGED_TABLES:
        prefix = "" if name == "preferences" else "feedback_"
        if not store.has(name):
            continue
        again = store.judged_again(name)
        conflicts = find_conflicts(store.connection, again)
        numbers[f"num_{prefix}conflicts"] = conflicts.num_rows
        if config.conflicts == "quarantine_all":
            store.mark(found_table(conflicts["example"].to_numpy(), conflicting[name], CONFLICT_TEXTS[name]))
        duplicates = find_duplicates(store.connection, again)
        numbers[f"num_{prefix}duplicates"] = duplicates.num_rows
        if config.duplicates == "keep_first":
            store.connection.register("repeats", duplicates)
            store.mark(
                f"select d.example, '{repeated[name].value}', null, 'repeats row ' || r.row || ' of ' || r.file "
                f"from repeats d join read_{name} r on r.example = d.first_example"
            )
            store.connection.unregister("repeats")
    if store.has("preferences"):
        numbers |= annotator_agreement(store.connection, "again_preferences")
        cycles = find_cycles(store.connection, "preferences")
        numbers |= {"num_cycle_rows": len(cycles.examples), "num_cycle_prompts": cycles.num_prompts}
        if config.max_pairs_per_prompt is not None:
            over = over_cap(store.connection, "preferences", config.max_pairs_per_prompt)
            rows = found_table(over["example"].to_numpy(), Reason.DUPLICATE_PAIR, "max_pairs_per_prompt")
            policies = pa.array([Policy.PAIRS_PER_PROMPT.value] * len(rows), pa.string())
            rows = rows.set_column(1, "reason", pa.nulls(len(rows), pa.string())).set_column(2, "policy", policies)
            store.mark(rows)
    return numbers


CONFLICT_TEXTS = {
    "preferences": "another row prefers these answers the other way",
    "feedback": "another row has the other label for the same answer",
}


def make_sides(store: Store, fraction: float, seed: int) -> None:
    """Make the table `sides` (group_key, cluster_key, is_validation) of the prompts of pairs and feedback."""
    tables = [name for name in JUDGED_TABLES if store.has(name)]
    used = " union all ".join(f"select group_key from {name}" for name in tables) or "select 0::bigint where false"
    # A cluster goes where its representative would go alone, so that a prompt without a twin never moves.
    side = side_sql("coalesce(c.cluster_key, g.group_key)", "coalesce(c.cluster_key_2, g.group_key_2)", seed, fraction)
    store.connection.execute(
        "create table sides as select g.group_key, coalesce(c.cluster_key, g.group_key) as cluster_key, "
        f"{side} as is_validation from groups g left join (select m.group_key, m.cluster_key, "
        "r.group_key_2 as cluster_key_2 from clusters m join groups r on r.group_key = m.cluster_key) c "
        f"using (group_key) where g.group_key in ({used})"
    )


def count_leaks(store: Store) -> Numbers:
    """Return the share of prompts with a near-duplicate on the other side: a cluster is bounded, and may be cut."""
    num_prompts = store.number("select count(*) from sides")
    leaking = store.number(
        "select count(distinct one) from (select p.first_key as one, p.second_key as other from near_pairs p "
        "where strength <= 1 union all select second_key, first_key from near_pairs where strength <= 1) "
        "join sides a on a.group_key = one join sides b on b.group_key = other where a.is_validation <> b.is_validation"
    )
    return {"near_duplicates_across_splits": leaking / num_prompts} if num_prompts else {}


def make_evaluation_groups(store: Store) -> None:
    """Make `held_out` where no file of evaluation prompts did: the prompts of the validation side."""
    if not store.has("eval_prompts"):
        store.connection.execute("create table held_out as select group_key from sides where is_validation")


def hold_out_rl_prompts(store: Store) -> None:
    if store.has("rl_prompts"):
        _hold_out(store, "rl_prompts")


def _decisions(store: Store, fingerprint: str, numbers: Numbers) -> Decisions:
    found = store.connection.sql("select * from found order by example").to_arrow_table()
    sides = store.connection.execute("select * from sides order by group_key").fetchnumpy()
    firsts, held_out = _first_examples(store)
    return Decisions(
        found.cast(FOUND_SCHEMA),
        np.asarray(sides["group_key"], np.int64),
        np.asarray(sides["cluster_key"], np.int64),
        np.asarray(sides["is_validation"], np.bool_),
        firsts[~held_out],
        firsts[held_out],
        fingerprint,
        numbers,
    )


def _first_examples(store: Store) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the first example of each distinct prompt, sorted, and whether it is held out; pairs come first."""
    tables = [name for name in JUDGED_TABLES if store.has(name)]
    if not tables:
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    union = " union all ".join(
        f"select {order} as place, example, prompt_key, group_key from {name}" for order, name in enumerate(tables)
    )
    first = "min(example)" if len(tables) == 1 else "min_by(example, (place, example))"
    found = store.connection.execute(
        f"select f.example, s.is_validation from (select {first} as example, any_value(group_key) as group_key "
        f"from ({union}) group by prompt_key) f join sides s using (group_key) order by 1"
    ).fetchnumpy()
    return np.asarray(found["example"], np.int64), np.asarray(found["is_validation"], np.bool_)
