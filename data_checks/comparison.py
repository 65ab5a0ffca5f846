"""Two versions of a data set: what came, what went, what changed, and how far its numbers drifted. No row text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_checks.result import CheckedData

if TYPE_CHECKING:
    import duckdb

MEMORY_BYTES = 1 << 30
MAX_PLACES = 5
IDENTITY = "content_hash, content_hash_2"
"""Two examples are the same when all that training could use of them is."""


KEYS_IN_COMMON = (
    ("chosen_key", "chosen_key"), ("rejected_key", "rejected_key"), ("chosen_key", "rejected_key"),
    ("rejected_key", "chosen_key"), ("prompt_key", "prompt_key"),
)  # fmt: skip
"""What a removed and an added example of one prompt must share for the one to be the other, changed: the surest first.
Where there are answers, a prompt alone is not enough."""


def compare(
    new: CheckedData, new_report: Mapping[str, Any], old: CheckedData, old_report: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return how `new` differs from `old`.

    Examples count whether they are used or not: a row that is quarantined now and was not before is no change of the
    data, and shows in the numbers.

    Args:
        new: the newer version.
        new_report: its report.json.
        old: the older version.
        old_report: its report.json.
        folder: for what does not fit in memory.

    Returns:
        `fingerprint {new, old}`; for each kind of input `added`, `removed`, `changed` and `unchanged` with the first
        places as file:row, where a changed example is one that was removed while one with the same prompt and one of
        its answers, or with the same prompt and no answer, was added; and `drift`: number -> {new, old, difference},
        for every number that both have.
    """
    from data_checks.whole.store import open_store, register

    folder.mkdir(parents=True, exist_ok=True)
    connection = open_store(folder, MEMORY_BYTES, 2)
    kinds = [kind for kind in (*new.features, *old.features) if kind in new.features or kind in old.features]
    tables: dict[str, Any] = {}
    try:
        for kind in dict.fromkeys(kinds):
            paths = {"new": new.features.get(kind), "old": old.features.get(kind)}
            for name, path in paths.items():
                other = next(other for other in paths.values() if other is not None)
                register(connection, f"{name}_rows", [path or other])
                where = "" if path is not None else "where false"
                connection.execute(f"create or replace view {name} as {_numbered(f'{name}_rows', where)}")
            tables[kind] = _compare(connection)
    finally:
        connection.close()
    return {
        "fingerprint": {"new": new.fingerprint, "old": old.fingerprint},
        "tables": tables,
        "drift": drift(new_report["metrics"], old_report["metrics"]),
    }


def _numbered(view: str, where: str) -> str:
    """Return a query of the readable rows, equal ones numbered: a row that stands twice is added twice."""
    return (
        f"select *, row_number() over (partition by {IDENTITY} order by example) as copy from {view} "
        f"{where or 'where content_hash is not null'}"
    )


def _compare(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    same = "n.content_hash = o.content_hash and n.content_hash_2 = o.content_hash_2 and n.copy = o.copy"
    connection.execute(f"create or replace temp table added as select n.* from new n anti join old o on {same}")
    connection.execute(f"create or replace temp table removed as select o.* from old o anti join new n on {same}")
    connection.execute("create or replace temp table matches (removed bigint, added bigint)")
    for of_removed, of_added in KEYS_IN_COMMON:
        _match(connection, of_removed, of_added)
    counts: dict[str, Any] = {
        "rows": {name: _count(connection, name) for name in ("new", "old")},
        "unchanged": _count(connection, "new") - _count(connection, "added"),
        "changed": _count(connection, "matches"),
    }
    places = {
        "changed": _places(connection, "added where example in (select added from matches)"),
        "added": _places(connection, "added where example not in (select added from matches)"),
        "removed": _places(connection, "removed where example not in (select removed from matches)"),
    }
    added, removed = (_count(connection, name) - counts["changed"] for name in ("added", "removed"))
    return {**counts, "added": added, "removed": removed, "places": places}


def _match(connection: duckdb.DuckDBPyConnection, of_removed: str, of_added: str) -> None:
    """Match what is left of removed and added rows that have a prompt and a key in common, first with first."""
    sides = {
        name: f"(select t.*, row_number() over (partition by prompt_key, {key} order by example) as place "
        f"from {name} t anti join matches m on m.{name} = t.example where {key} is not null)"
        for name, key in (("removed", of_removed), ("added", of_added))
    }
    connection.execute(
        f"insert into matches select r.example, a.example from {sides['removed']} r join {sides['added']} a "
        f"on r.prompt_key = a.prompt_key and r.{of_removed} = a.{of_added} and r.place = a.place"
        + (" where r.chosen_key is null and a.chosen_key is null" if of_removed == "prompt_key" else "")
    )


def _count(connection: duckdb.DuckDBPyConnection, source: str) -> int:
    ((value,),) = connection.execute(f"select count(*) from {source}").fetchall()
    return int(value)


def _places(connection: duckdb.DuckDBPyConnection, source: str) -> list[str]:
    rows = connection.execute(f'select file, "row" from {source} order by example limit {MAX_PLACES}').fetchall()
    return [f"{file}:{row}" for file, row in rows]


def drift(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return for each number that both versions have what it was, what it is, and the difference.

    >>> drift({"a": 3, "b": None}, {"a": 1, "c": 2})
    {'a': {'new': 3, 'old': 1, 'difference': 2}}
    """
    return {
        name: {"new": value, "old": old[name], "difference": value - old[name]}
        for name, value in new.items()
        if value is not None and old.get(name) is not None
    }
