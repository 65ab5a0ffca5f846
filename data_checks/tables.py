"""Pass 3: the examples leave the work folder as canonical Parquet tables; docs/stages.md names their columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_checks.batch import MAX_EXAMPLES
from data_checks.decide import JUDGED_TABLES, Decisions, sides_of
from data_checks.examine import Chunk
from data_checks.examples import CHUNK_BITS
from data_checks.result import Defects
from data_checks.table_files import (
    DROPPED_SCHEMA,
    FEEDBACK_SCHEMA,
    FINAL_FEATURES,
    PAIR_SCHEMA,
    PROMPT_SCHEMA,
    QUARANTINE_SCHEMA,
    QUICK,
    REJECTED,
    STEPWISE_SCHEMA,
    TEXT,
    TableWriter,
)

FATES = ("kept", "quarantined", "dropped")
KEPT, QUARANTINED, DROPPED = range(3)


@dataclass
class Written:
    """What pass 3 wrote, and the account of it."""

    tables: dict[str, Path]
    features: dict[str, Path]
    num_rows: dict[str, int]
    fates: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    """Kind of input -> (fate, reason or policy) -> examples."""
    defects: dict[str, dict[str, Defects]] = field(default_factory=dict)
    """Kind of input -> what only pass 2 found."""
    longest_prompt_tokens: dict[str, int | None] = field(default_factory=dict)


@dataclass
class Piece:
    """One chunk with what was decided on it."""

    chunk: Chunk
    table: pa.Table | None
    """The examples as they are; None where no tables are written."""
    features: pa.Table
    fate: NDArray[np.int8]
    """Indices into `FATES`."""
    reason: pa.Array
    policy: pa.Array
    detail: pa.Array
    found_late: NDArray[np.int64]
    """Places of the examples that only pass 2 took out."""
    split: pa.Array
    cluster: NDArray[np.int64]
    is_validation: NDArray[np.bool_]

    def kept(self) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = self.fate == KEPT
        return kept


def pieces(chunks: Sequence[Chunk], decisions: Decisions) -> Iterator[Piece]:
    """Yield each chunk with its examples' fates, in file order."""
    found = decisions.found
    numbers = found["example"].to_numpy()
    for chunk in chunks:
        table = None
        if chunk.canonical is not None:
            with pa.memory_map(str(chunk.canonical)) as source:
                table = pa.ipc.open_file(source).read_all()
        features = pq.read_table(chunk.features)
        base = chunk.number << CHUNK_BITS
        start, end = np.searchsorted(numbers, [base, base + (1 << CHUNK_BITS)])
        late = found.slice(start, end - start)
        places = late["example"].to_numpy() - base
        reason, policy = (_replaced(features[name], places, late[name]) for name in ("reason", "policy"))
        details = pa.nulls(features.num_rows, TEXT) if table is None else table["detail"]
        detail = _replaced(details, places, late["detail"])
        fate = np.full(features.num_rows, KEPT, dtype=np.int8)
        fate[policy.is_valid().to_numpy(zero_copy_only=False)] = DROPPED
        fate[reason.is_valid().to_numpy(zero_copy_only=False)] = QUARANTINED
        cluster, is_validation = sides_of(features["group_key"].fill_null(0).to_numpy(), decisions)
        in_split = (fate == KEPT) & (chunk.table in JUDGED_TABLES)
        split = _named(is_validation.astype(np.int8), ("train", "validation"), ~in_split)
        yield Piece(chunk, table, features, fate, reason, policy, detail, places, split, cluster, is_validation)


def _named(codes: NDArray[np.int8], names: Sequence[str], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return the names that codes stand for, null where missing."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing), pa.array(names, TEXT)).cast(TEXT)


def _replaced(column: pa.ChunkedArray, places: NDArray[np.int64], values: pa.ChunkedArray) -> pa.Array:
    """Return a column with other values at some places."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not len(places):
        return array
    mask = np.zeros(len(array), np.bool_)
    mask[places] = True
    return pc.replace_with_mask(array, pa.array(mask), values.combine_chunks())


class OutputWriter:
    """Writes all outputs in one pass over the chunks."""

    def __init__(self, folder: Path | None, features_folder: Path, kinds: Sequence[str], decisions: Decisions) -> None:
        """Open the outputs.

        Args:
            folder: of the tables; None: only the account and the numbers are wanted.
            features_folder: of the numbers.
            kinds: of input that are there.
            decisions: of pass 2.
        """
        self.decisions = decisions
        self.kinds = kinds
        self._stack = ExitStack()
        schemas = {
            "train_pairs": PAIR_SCHEMA,
            "validation_pairs": PAIR_SCHEMA,
            "rl_prompts": PROMPT_SCHEMA,
            "eval_prompts": PROMPT_SCHEMA,
            "quarantine": QUARANTINE_SCHEMA,
            "dropped": DROPPED_SCHEMA,
        }
        if "feedback" in kinds:
            schemas |= {"train_feedback": FEEDBACK_SCHEMA, "validation_feedback": FEEDBACK_SCHEMA}
        if "stepwise" in kinds:
            schemas["stepwise"] = STEPWISE_SCHEMA
        paths = {} if folder is None else {name: folder / f"{name}.parquet" for name in schemas}
        self._writers = {name: TableWriter(self._stack, path, schemas[name]) for name, path in paths.items()}
        features = {kind: features_folder / f"{kind}.parquet" for kind in kinds}
        # Read once more and then deleted: speed counts, size does not.
        self._features = {
            kind: TableWriter(self._stack, path, FINAL_FEATURES, **QUICK) for kind, path in features.items()
        }
        self.written = Written(paths, features, {})
        self._num_examples: Counter[str] = Counter()

    def write_all(self, chunks: Sequence[Chunk], on_chunk: Callable[[int], None]) -> Written:
        """Write every chunk.

        Args:
            chunks: in file order.
            on_chunk: called with the number of chunks done.
        """
        with self._stack:
            for done, piece in enumerate(pieces(chunks, self.decisions), start=1):
                self._write_features(piece)
                self._account(piece)
                if piece.table is not None:
                    self._write_rows(piece, piece.table)
                else:
                    self._count_rows(piece)
                on_chunk(done)
        if self._writers:
            self.written.num_rows = {name: writer.num_rows for name, writer in self._writers.items()}
        else:
            self._count_prompts()
        return self.written

    def _write_features(self, piece: Piece) -> None:
        size, kind = piece.features.num_rows, piece.chunk.table
        numbers = pa.array(np.arange(self._num_examples[kind], self._num_examples[kind] + size, dtype=np.int64))
        self._num_examples[kind] += size
        cluster = pa.array(piece.cluster, mask=piece.features["group_key"].is_null().to_numpy())
        decided = {
            "example": numbers,
            "reason": piece.reason,
            "policy": piece.policy,
            "fate": _named(piece.fate, FATES),
            "split": piece.split,
            "cluster_key": cluster,
        }
        names = FINAL_FEATURES.names
        columns = [decided[name] if name in decided else piece.features[name] for name in names]
        table = pa.Table.from_arrays(columns, schema=FINAL_FEATURES)
        self._features[kind].write(table)

    def _account(self, piece: Piece) -> None:
        kind = piece.chunk.table
        counts = self.written.fates.setdefault(kind, Counter())
        counts["kept", ""] += int(np.count_nonzero(piece.fate == KEPT))
        for code, why in ((QUARANTINED, piece.reason), (DROPPED, piece.policy)):
            names = why.filter(pa.array(piece.fate == code)).value_counts().to_pylist()
            counts.update({(FATES[code], item["values"]): item["counts"] for item in names})
        late = self.written.defects.setdefault(kind, {})
        for place in piece.found_late.tolist():
            reason = piece.reason[place].as_py()
            if reason is None:
                continue
            found = late.setdefault(reason, Defects(detail=piece.detail[place].as_py()))
            found.rows += 1
            if len(found.examples) < MAX_EXAMPLES:
                found.examples.append(f"{piece.features['file'][place]}:{piece.features['row'][place]}")

    def _count_rows(self, piece: Piece) -> None:
        """Count what `_write_rows` would write, prompts of pairs and feedback aside."""
        kind, kept = piece.chunk.table, piece.kept()
        names = {"preferences": "pairs", "feedback": "feedback"}
        counts = self.written.num_rows
        if kind in names:
            for side, mask in (("train", kept & ~piece.is_validation), ("validation", kept & piece.is_validation)):
                name = f"{side}_{names[kind]}"
                counts[name] = counts.get(name, 0) + int(mask.sum())
        else:
            counts[kind] = counts.get(kind, 0) + int(kept.sum())
            self._note_longest(piece, kind, kept)

    def _count_prompts(self) -> None:
        counts = self.written.num_rows
        for name in ("train_pairs", "validation_pairs"):
            counts.setdefault(name, 0)
        counts.setdefault("rl_prompts", len(self.decisions.train_prompts))
        counts.setdefault("eval_prompts", len(self.decisions.validation_prompts))

    def _write_rows(self, piece: Piece, rows: pa.Table) -> None:
        kind, kept = piece.chunk.table, piece.kept()
        rejected = pa.Table.from_arrays(
            [piece.reason, piece.policy, piece.detail, *(rows[name] for name in REJECTED_NAMES[1:])],
            names=["reason_code", "policy", *REJECTED_NAMES],
        )
        for name, fate, schema in (
            ("quarantine", QUARANTINED, QUARANTINE_SCHEMA),
            ("dropped", DROPPED, DROPPED_SCHEMA),
        ):
            if (chosen := piece.fate == fate).any():
                self._writers[name].write(rejected.filter(pa.array(chosen)).select(schema.names))
        if kind == "preferences":
            self._write_sides(piece, rows, kept, "pairs", PAIR_SCHEMA)
        elif kind == "feedback":
            self._write_sides(piece, rows, kept, "feedback", FEEDBACK_SCHEMA)
        elif kind == "stepwise":
            self._writers[kind].write(_as(rows.filter(pa.array(kept)), STEPWISE_SCHEMA))
        else:
            self._write_prompts(piece, rows, kind, kept)

    def _write_sides(
        self, piece: Piece, rows: pa.Table, kept: NDArray[np.bool_], suffix: str, schema: pa.Schema
    ) -> None:
        ids = _cluster_ids(piece, rows)
        table = rows.append_column("split", piece.split).append_column("cluster_id", ids)
        for name, side in (("train", kept & ~piece.is_validation), ("validation", kept & piece.is_validation)):
            self._writers[f"{name}_{suffix}"].write(_as(table.filter(pa.array(side)), schema))
        base = piece.chunk.number << CHUNK_BITS
        for name, firsts in (
            ("rl_prompts", self.decisions.train_prompts),
            ("eval_prompts", self.decisions.validation_prompts),
        ):
            if name in self.kinds:
                continue
            start, end = np.searchsorted(firsts, [base, base + (1 << CHUNK_BITS)])
            places = firsts[start:end] - base
            if len(places):
                mask = np.zeros(rows.num_rows, np.bool_)
                mask[places] = True
                self._write_prompts(piece, rows, name, mask)

    def _write_prompts(self, piece: Piece, rows: pa.Table, name: str, mask: NDArray[np.bool_]) -> None:
        chosen = pa.array(mask)
        table = rows.filter(chosen)
        if piece.chunk.table in JUDGED_TABLES:
            table = _prompts_of_rows(table)
        self._writers[name].write(_as(table, PROMPT_SCHEMA))
        self._note_longest(piece, name, mask)

    def _note_longest(self, piece: Piece, name: str, mask: NDArray[np.bool_]) -> None:
        longest = pc.max(piece.features["prompt_tokens"].filter(pa.array(mask))).as_py()
        known = self.written.longest_prompt_tokens.get(name)
        if longest is not None:
            self.written.longest_prompt_tokens[name] = max(longest, known or 0)


def texts_of(messages: pa.ChunkedArray) -> pa.Array:
    """Return the contents of each list of messages, joined by line breaks; null where there is none."""
    column = messages.combine_chunks()
    contents = pc.struct_field(column.values, "content")
    lists = pa.ListArray.from_arrays(column.offsets, contents, mask=column.is_null() if column.null_count else None)
    return pc.binary_join(lists, "\n")


REJECTED_NAMES = [name for name, _ in REJECTED]


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema`; an answer is what the canonical table calls chosen."""
    names = [name.replace("answer_", "chosen_") for name in schema.names]
    for name in names:
        if name.endswith("_text"):
            table = table.append_column(name, texts_of(table[name.replace("_text", "_messages")]))
    return table.select(names).rename_columns(schema.names).cast(schema)


def _prompts_of_rows(table: pa.Table) -> pa.Table:
    """Return pairs or feedback as the prompts they are about."""
    from data_checks.keys import short_hash

    ids = [
        short_hash([[turn["role"], turn["content"]] for turn in turns])
        for turns in table["prompt_messages"].to_pylist()
    ]
    for name, values in (("prompt_id", ids), ("extra", ["{}"] * len(ids))):
        column = pa.array(values, TEXT)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _cluster_ids(piece: Piece, rows: pa.Table) -> pa.Array:
    """Return the first half of the cluster's id: the group's id where the prompt stands alone."""
    groups = piece.features["group_key"].fill_null(0).to_numpy()
    same = piece.cluster == groups
    ids = rows["group_id"].to_pylist()
    clusters = piece.cluster.tolist()
    return pa.array(
        [own if alone else f"{key & (2**64 - 1):016x}" for own, alone, key in zip(ids, same, clusters, strict=True)],
        TEXT,
    )
