"""The columns of one chunk of examples: texts as they are, and numbers on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from data_checks.batch import Batch, Row
from data_checks.canonical import CANONICAL_SCHEMA, joined_texts, messages_array, table_of
from data_checks.features import Flag, text_features
from data_checks.keys import (
    content_digest,
    digest,
    example_digest,
    judgement_of,
    normalise_all,
    normalised,
    text_keys,
)
from data_checks.rows import FeedbackRow, PairRow, PromptItem, StepwiseRow, Turns, describe_findings, primary

if TYPE_CHECKING:
    from data_checks.whole.contamination import EvaluationIndex

CHUNK_BITS = 24
"""An example's number is its chunk's number and, in this many bits, its place there: file order, without counting."""
WRITTEN_LATER = ("split", "prompt_text", "chosen_text", "rejected_text")
"""Canonical columns that pass 3 makes: they follow from the others, or are not known yet."""
SPILL_SCHEMA = pa.schema(
    [
        *(field for field in CANONICAL_SCHEMA if field.name not in WRITTEN_LATER),
        ("detail", pa.string()),
        ("raw", pa.string()),
        ("byte_offset", pa.int64()),
    ]
)
KINDS = {FeedbackRow: "unpaired", PromptItem: "rl_prompt", StepwiseRow: "stepwise"}
PARTS = ("prompt", "chosen", "rejected")
COUNTS = ("words", "newlines", "bullets", "headers", "code_blocks", "bold", "emoji", "digits")
FEATURE_SCHEMA = pa.schema(
    [
        ("example", pa.int64()),
        ("file", pa.string()),
        ("row", pa.int64()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("usable", pa.bool_()),
        ("reason", pa.string()),
        ("policy", pa.string()),
        *(
            (name, pa.int64())
            for name in ("group_key", "group_key_2", "prompt_key", "chosen_key", "rejected_key", "prompt_id_key")
        ),
        *((name, pa.int64()) for name in ("content_hash", "content_hash_2")),
        ("num_turns", pa.int32()),
        *((f"{part}_characters", pa.int32()) for part in PARTS),
        *((f"{part}_tokens", pa.int32()) for part in PARTS),
        *((name, pa.float64()) for name in ("margin", "chosen_score", "rejected_score", "rating")),
        ("label", pa.bool_()),
        ("is_tie", pa.bool_()),
        ("chosen_position", pa.int32()),
        ("annotator", pa.string()),
        *((f"{part}_flags", pa.int32()) for part in PARTS),
        *((f"{side}_{count}", pa.int32()) for side in PARTS[1:] for count in COUNTS),
    ]
)
"""Numbers on each example, no text. Keys and hashes are null for rows that could not be read."""
_TEXT_COLUMNS = ("annotator", "tools", "ground_truth", "data_source", "ability", "prompt_id")
_NUMBER_COLUMNS = ("margin", "chosen_score", "rejected_score", "label", "rating")


@dataclass
class ExampleColumns:
    """One chunk as columns, an entry an example."""

    number: int
    batch: Batch
    pair_kind: str
    """What the judgements of pairs are: `pair` or `ranked`."""
    columns: dict[str, list[Turns | None]]
    """Part -> turns."""
    texts: dict[str, list[str | None]]
    """Part -> contents of the turns, joined by line breaks."""
    numbers: dict[str, NDArray[Any]]
    """What `text_features` says."""
    group_texts: list[str | None]
    """The normalised prompts, system turns left out, as one text each."""
    group_digests: list[bytes | None]
    example_digests: list[bytes | None]

    @classmethod
    def of(cls, batch: Batch, number: int, pair_kind: str = "pair") -> ExampleColumns:
        columns = {"prompt": batch.prompts, "chosen": batch.chosen, "rejected": batch.rejected}
        joined = {part: joined_texts(column) for part, column in columns.items()}
        texts, groups = _groups(batch.prompts)
        examples = [
            None if prompt is None else example_digest(prompt, chosen or (), rejected, row and _judgement(row))
            for prompt, chosen, rejected, row in zip(
                batch.prompts, batch.chosen, batch.rejected, batch.rows, strict=True
            )
        ]
        return cls(number, batch, pair_kind, columns, joined, text_features(joined), texts, groups, examples)

    def contaminated(self, index: EvaluationIndex) -> list[int]:
        """Return the places of the examples that hold a prompt of the evaluation."""
        found = np.zeros(len(self.batch), np.bool_)
        for column in self.texts.values():
            found |= index.hits([text or "" for text in column])
        return [int(place) for place in np.flatnonzero(found)]

    def with_secrets(self) -> list[int]:
        """Return the places of the examples in whose texts a secret stands."""
        flags = np.bitwise_or.reduce([np.ma.filled(self.numbers[f"{part}_flags"], 0) for part in PARTS])
        return [int(index) for index in np.flatnonzero(flags & int(Flag.SECRET))]

    def _attribute(self, name: str) -> list[Any] | None:
        """Return one field of every row, None where no row has it. Plain pairs have no more than their texts."""
        if not self.batch.known:
            return None
        values: list[Any] = [None] * len(self.batch)
        for place, row in self.batch.known:
            values[place] = getattr(row, name, None)
        return values

    def _kinds(self) -> list[str | None]:
        kinds: list[str | None] = [None if prompt is None else "pair" for prompt in self.batch.prompts]
        for place, row in self.batch.known:
            kinds[place] = self.pair_kind if isinstance(row, PairRow) else KINDS[type(row)]
        return kinds

    def write_canonical(self, path: Path) -> Path:
        """Write the examples with what is wrong with them and with the rows as they were read."""
        batch = self.batch
        size = len(batch)
        columns: dict[str, Any] = {
            "example_id": _hexes(self.example_digests, [isinstance(row, PromptItem) for row in batch.rows]),
            "source": batch.sources,
            "group_id": _hexes(self.group_digests),
            "label_kind": self._kinds(),
            "source_file": [origin.file for origin in batch.origins],
            "source_row": [origin.number for origin in batch.origins],
            "extra": self._extra(),
            "byte_offset": [origin.offset for origin in batch.origins],
            **{f"{part}_messages": messages_array(column) for part, column in self.columns.items()},
            **{name: self._attribute(name) for name in _TEXT_COLUMNS + _NUMBER_COLUMNS},
        }
        if batch.findings or batch.dropped:
            found, dropped = batch.findings, batch.dropped
            details = {place: item.detail for place, item in dropped.items()}
            details |= {place: describe_findings(findings) for place, findings in found.items()}
            columns["detail"] = [details.get(place) for place in range(size)]
        columns["raw"] = [origin.raw for origin in batch.origins]
        write_arrow(table_of(columns, size, SPILL_SCHEMA), path)
        return path

    def _extra(self) -> list[str | None]:
        return [
            "{}" if row is None else _with_labels(row) if isinstance(row, StepwiseRow) else row.extra
            for row in self.batch.rows
        ]

    def write_features(self, path: Path, sample_limit: int) -> tuple[Path, pa.Table]:
        """Write the numbers of the examples; return those that may be in the sample, texts included.

        Args:
            path: of the file.
            sample_limit: usable examples with a smaller or equal content hash may be in the sample.
        """
        batch, size = self.batch, len(self.batch)
        contents = [
            value if value is None or row is None else content_digest(row, value)
            for row, value in zip(batch.rows, self.example_digests, strict=True)
        ]
        unusable = set(batch.findings) | set(batch.dropped)
        usable = np.ones(size, np.bool_)
        usable[list(unusable)] = False
        kinds, prompts = self._kinds(), self._prompt_digests()
        groups, hashes = _words(self.group_digests), _words(contents)
        columns: dict[str, Any] = {
            "example": (self.number << CHUNK_BITS) + np.arange(size, dtype=np.int64),
            "file": [origin.file for origin in batch.origins],
            "row": [origin.number for origin in batch.origins],
            "source": batch.sources,
            "kind": kinds,
            "usable": usable,
            "group_key": groups[0],
            "group_key_2": groups[1],
            "prompt_key": groups[0] if prompts is self.group_digests else _words(prompts)[0],
            "chosen_key": _signed(text_keys(batch.chosen)),
            "rejected_key": _signed(text_keys(batch.rejected)),
            "prompt_id_key": self._prompt_id_keys(),
            "content_hash": hashes[0],
            "content_hash_2": hashes[1],
            "num_turns": [None if turns is None else len(turns) for turns in batch.prompts],
            **self.numbers,
            **{name: self._attribute(name) for name in (*_NUMBER_COLUMNS, "chosen_position", "annotator")},
            "is_tie": [
                None if rejected is None else row is not None and getattr(row, "is_tie", False)
                for row, rejected in zip(batch.rows, batch.rejected, strict=True)
            ],
        }
        for part in PARTS:
            columns[f"{part}_tokens"] = self._attribute(f"{part}_tokens")
        if (answers := self._attribute("answer_tokens")) is not None and columns["chosen_tokens"] is not None:
            pairs = columns["chosen_tokens"]
            columns["chosen_tokens"] = [b if a is None else a for a, b in zip(pairs, answers, strict=True)]
        if unusable:
            found, dropped = batch.findings, batch.dropped
            reasons = {place: primary(findings).reason.value for place, findings in found.items()}
            policies = {place: item.policy.value for place, item in dropped.items() if place not in found}
            for name, values in (("reason", reasons), ("policy", policies)):
                columns[name] = [values.get(place) for place in range(size)]
        table = table_of(columns, size, FEATURE_SCHEMA)
        names = ["file", "source", "kind", "annotator", "reason", "policy"]
        pq.write_table(table, path, compression="lz4", use_dictionary=names)
        return path, self._candidates(table, sample_limit)

    def _candidates(self, features: pa.Table, limit: int) -> pa.Table:
        chosen = pc.and_(features["usable"], pc.less_equal(features["content_hash"], limit))
        places = np.flatnonzero(chosen.fill_null(False).to_numpy())
        table = features.take(pa.array(places))
        for part in PARTS:
            column = self.texts[part]
            table = table.append_column(
                f"{part}_text", pa.array([column[place] for place in places.tolist()], pa.string())
            )
        return table

    def _prompt_id_keys(self) -> pa.Array | None:
        if (ids := self._attribute("prompt_id")) is None:
            return None
        return _signed([None if name is None else xxhash.xxh3_64_intdigest(name.encode()) for name in ids])

    def _prompt_digests(self) -> list[bytes | None]:
        """Return the digest of all turns of each prompt, system turns included."""
        prompts = self.batch.prompts
        if not any(turns is not None and turns and turns[0][0] == "system" for turns in prompts):
            # A system turn elsewhere is an error of roles, and such a row is not usable.
            return self.group_digests
        return [
            group if turns is None or all(turn[0] != "system" for turn in turns) else digest(normalised(turns))
            for turns, group in zip(prompts, self.group_digests, strict=True)
        ]

    def write_sketches(self, path: Path) -> Path | None:
        """Write the sketches of the distinct prompts, by which near-duplicates are found."""
        from data_checks.whole.sketches import sketch

        texts = {
            value: text
            for value, text in zip(self.group_digests, self.group_texts, strict=True)
            if value is not None and text is not None
        }
        if not texts:
            return None
        keys = np.frombuffer(b"".join(value[:8] for value in texts), ">i8").astype(np.int64)
        pq.write_table(sketch(list(texts.values()), keys), path, compression="none")
        return path

    def write_prefixes(self, path: Path) -> Path | None:
        """Write, for each prompt of several turns, the keys of the prompts that it continues."""
        found: dict[tuple[bytes, bytes], None] = {}
        for turns, value in zip(self.batch.prompts, self.group_digests, strict=True):
            if turns is None or value is None or len(turns) < 3:
                continue
            spoken = normalised(turn for turn in turns if turn[0] != "system")
            for end in range(1, len(spoken)):
                if spoken[end][0] == "assistant":
                    found[(value, digest(spoken[:end]))] = None
        if not found:
            return None
        keys = [np.frombuffer(b"".join(pair[side][:8] for pair in found), ">i8").astype(np.int64) for side in (0, 1)]
        pq.write_table(pa.table({"group_key": keys[0], "prefix_key": keys[1]}), path)
        return path


def _groups(prompts: Sequence[Turns | None]) -> tuple[list[str | None], list[bytes | None]]:
    """Return of each prompt without its system turns the normalised text, and the digest that its group id starts."""
    if all(turns is not None and len(turns) == 1 and turns[0][0] == "user" for turns in prompts):
        plain = normalise_all([turns[0][1] for turns in prompts if turns])
        return list(plain), [digest([["user", text]]) for text in plain]
    spoken = [
        None if turns is None else normalised(turn for turn in turns if turn[0] != "system")
        for turns in prompts
    ]  # fmt: skip
    texts = [None if turns is None else "\n".join(content for _, content in turns) for turns in spoken]
    return texts, [None if turns is None else digest(turns) for turns in spoken]


def _judgement(row: Row | None) -> list[object] | None:
    return judgement_of(row) if isinstance(row, FeedbackRow | StepwiseRow) else None


def _with_labels(row: StepwiseRow) -> str:
    """Return the other columns with the steps' labels, for which there is no column."""
    return orjson.dumps({**orjson.loads(row.extra), "labels": list(row.labels)}, option=orjson.OPT_SORT_KEYS).decode()


def _hexes(digests: Sequence[bytes | None], without: Sequence[bool] | None = None) -> list[str | None]:
    if without is None or not any(without):
        return [None if value is None else value[:16].hex() for value in digests]
    return [None if value is None or no else value[:16].hex() for value, no in zip(digests, without, strict=True)]


def _words(digests: Sequence[bytes | None]) -> tuple[pa.Array, pa.Array]:
    """Return the first and the second 8 bytes of each digest as signed numbers (big-endian), null without a digest."""
    mask = None
    if None in digests:
        mask = np.fromiter((value is None for value in digests), np.bool_, len(digests))
        digests = [bytes(32) if value is None else value for value in digests]
    whole = np.frombuffer(b"".join(digests), ">i8").reshape(-1, 4)  # type: ignore[arg-type]
    first, second = (pa.array(whole[:, at].astype(np.int64), mask=mask) for at in (0, 1))
    return first, second


def _signed(keys: Sequence[int | None]) -> pa.Array:
    if None not in keys:
        return pa.array(np.array(keys, np.uint64).view(np.int64))
    words = np.array([0 if key is None else key for key in keys], np.uint64).view(np.int64)
    return pa.array(words, mask=np.fromiter((key is None for key in keys), np.bool_, len(keys)))


def write_arrow(table: pa.Table, path: Path) -> None:
    """Write a table of the work folder: read once, soon, and by this program."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
