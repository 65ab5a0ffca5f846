"""Rows that repeat or contradict others, and prompts that weigh too much.

Every function reads a view with the columns of `examples.FEATURE_SCHEMA`, rows without a finding only, of one kind:
pairs, or judged answers (where `rejected_key` is null; for pairs `label` and `rating` are).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_checks.whole.store import columns, number

if TYPE_CHECKING:
    import duckdb

JUDGEMENT = ("prompt_key", "chosen_key", "rejected_key", "label", "rating", "annotator")
"""What two rows have in common when one repeats the other. What two people say of the same answers are two judgements:
neither a repeat nor a contradiction, but agreement or none."""
LOW = "coalesce(least(chosen_key, rejected_key), chosen_key)"
HIGH = "coalesce(greatest(chosen_key, rejected_key), chosen_key)"
"""The answers that are judged, whichever is preferred."""
JUDGE = "(hash(prompt_key, annotator) >> 1)::bigint"
"""Of one prompt, each person's preferences are a graph of their own: people may differ, a person should not."""
EDGES_AT_ONCE = 2_000_000
"""Preferences whose graph is held in memory at a time: about 200 MB."""
TRIMMING_ROUNDS = 8
"""Most times that the ends of chains are cut off before the graph is built: answers ranked among eight need four."""


def judged_again(view: str) -> str:
    """Return a query for the rows of a view that judge what another one judges: one prompt, and the same answers.

    Only among them are repeats, conflicts and comparisons of people, and in most data they are few.
    """
    columns = ", ".join(("example", *JUDGEMENT))
    item = f"hash(prompt_key, {LOW}, {HIGH})"
    return f"select {columns} from {view} where {item} in (select {item} from {view} group by 1 having count(*) > 1)"


def find_duplicates(connection: duckdb.DuckDBPyConnection, view: str) -> pa.Table:
    """Return each row that repeats an earlier one: prompt, answers and, of judged answers, label and rating are equal.

    Returns:
        Columns `example` and `first_example` (the first row that it repeats), sorted by example.
    """
    repeated = (
        f"select {', '.join(JUDGEMENT)}, min(example) as first_example from {view} "
        f"group by {', '.join(JUDGEMENT)} having count(*) > 1"
    )
    same = " and ".join(
        f"r.{name} = v.{name}" if name in ("prompt_key", "chosen_key") else f"r.{name} is not distinct from v.{name}"
        for name in JUDGEMENT
    )
    return connection.sql(
        f"select v.example, r.first_example from {view} v join ({repeated}) r on {same} "
        "where v.example <> r.first_example order by 1"
    ).to_arrow_table()


def find_conflicts(connection: duckdb.DuckDBPyConnection, view: str) -> pa.Table:
    """Return each row that another one contradicts.

    For one prompt and one annotator (or rows that name none), a pair contradicts the pair with the same answers
    exchanged, and a judged answer the same answer with the other label. Answers that are equal but for case and spaces
    contradict nothing, nor do ratings that differ: several people may have given them.

    Returns:
        Column `example`, sorted.
    """
    pairs = (
        "select prompt_key, annotator, least(chosen_key, rejected_key) as low, "
        f"greatest(chosen_key, rejected_key) as high from {view} where chosen_key <> rejected_key "
        "group by 1, 2, 3, 4 having min(chosen_key) <> max(chosen_key)"
    )
    answers = (
        f"select prompt_key, annotator, chosen_key from {view} where rejected_key is null and label is not null "
        "group by 1, 2, 3 having count(distinct label) > 1"
    )
    same = "v.prompt_key = o.prompt_key and v.annotator is not distinct from o.annotator"
    return connection.sql(
        f"select v.example from {view} v join ({pairs}) o on {same} "
        "and least(v.chosen_key, v.rejected_key) = o.low and greatest(v.chosen_key, v.rejected_key) = o.high "
        "where v.rejected_key is not null union all "
        f"select v.example from {view} v join ({answers}) o on {same} "
        "and v.chosen_key = o.chosen_key where v.rejected_key is null and v.label is not null order by 1"
    ).to_arrow_table()


def annotator_agreement(connection: duckdb.DuckDBPyConnection, view: str) -> dict[str, float | int | None]:
    """Return how far people agree where several judged the same.

    An item is a prompt with its two answers (or its one judged answer). Of each item, every two people who judged it
    make one comparison; people who contradict themselves on an item are left out of it. Agreement is the share of
    comparisons in which both said the same (observed agreement, not corrected for chance).

    Returns:
        `annotator_agreement_fraction` (0 to 1, None where no item was judged twice) and `num_items_judged_by_several`.
    """
    said = "case when rejected_key is null then label else chosen_key < rejected_key end"
    known = "annotator is not null and ((rejected_key is null and label is not null) or chosen_key <> rejected_key)"
    found = connection.sql(
        "select count(*), sum(yes * (yes - 1) + no * (no - 1)), sum((yes + no) * (yes + no - 1)) from ("
        "select sum(case when said then 1 else 0 end) as yes, sum(case when said then 0 else 1 end) as no from ("
        "select prompt_key, low, high, annotator, bool_and(said) as said from ("
        f"select prompt_key, {LOW} as low, {HIGH} as high, annotator, {said} as said from {view} where {known}) "
        "group by 1, 2, 3, 4 having bool_and(said) = bool_or(said)) "
        "group by prompt_key, low, high having count(*) > 1)"
    ).fetchall()
    ((items, agreeing, comparisons),) = found
    fraction = None if not comparisons else float(agreeing) / float(comparisons)
    return {"annotator_agreement_fraction": fraction, "num_items_judged_by_several": int(items)}


@dataclass(frozen=True)
class Cycles:
    """Preferences that lead in a circle: no order of the answers satisfies all of them."""

    examples: NDArray[np.int64]
    """Numbers of the rows, sorted."""
    num_prompts: int
    """Prompts that have such a circle."""


def find_cycles(connection: duckdb.DuckDBPyConnection, view: str) -> Cycles:
    """Return the pairs inside circles of three answers or more (A over B over C over A).

    Of each prompt and annotator, answers are nodes and preferences edges; a circle lies in a strongly connected
    component. Two answers preferred both ways are a conflict, which `find_conflicts` finds; where such rows are kept,
    they join the components that they touch.
    """
    connection.execute(
        f"create or replace temp table preference_edges as select distinct {JUDGE} as judge_key, chosen_key, "
        f"rejected_key from {view} where chosen_key <> rejected_key and prompt_key in "
        f"(select prompt_key from {view} group by 1 having count(*) > 2)"
    )
    _trim_chains(connection)
    total = number(connection, "select count(*) from preference_edges")
    parts = -(-total // EDGES_AT_ONCE)
    connection.execute("create or replace temp table cycle_edges as select * from preference_edges limit 0")
    for part in range(parts):
        edges = columns(connection, f"select * from preference_edges where judge_key % {parts} = {part}")
        inside = _in_cycles(*edges)
        found = pa.table(dict(zip(("p", "c", "r"), (column[inside] for column in edges), strict=True)))
        connection.register("new_cycle_edges", found)
        connection.execute("insert into cycle_edges select * from new_cycle_edges")
        connection.unregister("new_cycle_edges")
    inside_cycles = (
        f"(select *, {JUDGE} as judge_key from {view}) join cycle_edges using (judge_key, chosen_key, rejected_key)"
    )
    (examples,) = columns(connection, f"select example from {inside_cycles} order by 1")
    prompts = number(connection, f"select count(distinct prompt_key) from {inside_cycles}")
    for table in ("preference_edges", "cycle_edges"):
        connection.execute(f"drop table {table}")
    return Cycles(examples, prompts)


def _trim_chains(connection: duckdb.DuckDBPyConnection) -> None:
    """Keep the preferences whose better answer is also a worse one, and the other way round, as often as it helps.

    In a circle every answer is both. What is cut off lies at the ends of chains, so no circle is lost.
    """
    before = number(connection, "select count(*) from preference_edges")
    for _ in range(TRIMMING_ROUNDS):
        connection.execute(
            "create or replace temp table preference_edges as select e.* from preference_edges e "
            "semi join preference_edges b on e.judge_key = b.judge_key and e.chosen_key = b.rejected_key "
            "semi join preference_edges w on e.judge_key = w.judge_key and e.rejected_key = w.chosen_key"
        )
        left = number(connection, "select count(*) from preference_edges")
        if left in (0, before):
            return
        before = left


def _in_cycles(prompts: NDArray[np.int64], chosen: NDArray[np.int64], rejected: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which edges lie inside a strongly connected component of three nodes or more."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = len(prompts)
    both = np.stack([np.concatenate([prompts, prompts]), np.concatenate([chosen, rejected])])
    order = np.lexsort(both)
    ordered = both[:, order]
    is_new = np.ones(2 * size, bool)
    is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    nodes = np.empty(2 * size, np.int32)
    nodes[order] = np.cumsum(is_new) - 1
    start, end = nodes[:size], nodes[size:]
    num_nodes = int(is_new.sum())
    graph = coo_array((np.ones(size, np.int8), (start, end)), shape=(num_nodes, num_nodes))
    _, labels = connected_components(graph, directed=True, connection="strong")
    large = np.bincount(labels) >= 3
    return np.asarray((labels[start] == labels[end]) & large[labels[start]])


def over_cap(connection: duckdb.DuckDBPyConnection, view: str, max_pairs_per_prompt: int) -> pa.Table:
    """Return the rows of each prompt (system turns aside) after its first `max_pairs_per_prompt`, in file order.

    Returns:
        Column `example`, sorted.
    """
    if max_pairs_per_prompt < 1:
        raise ValueError(f"max_pairs_per_prompt: {max_pairs_per_prompt}: must be at least 1")
    large = f"select group_key from {view} group by 1 having count(*) > {max_pairs_per_prompt}"
    return connection.sql(
        "select example from (select example, row_number() over (partition by group_key order by example) as place "
        f"from {view} where group_key in ({large})) where place > {max_pairs_per_prompt} order by 1"
    ).to_arrow_table()
