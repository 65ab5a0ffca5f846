"""The columns of one chunk of examples: texts as they are, and numbers on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from data_checks.canonical import CANONICAL_SCHEMA, table_of
from data_checks.columns import TurnColumn
from data_checks.cut_short import cut_short
from data_checks.features import Flag, text_features
from data_checks.keys import (
    content_digest,
    digest,
    example_digest,
    judgement_of,
    normalise_all,
    normalised,
    plain_digests,
    text_keys,
)
from data_checks.rows import FeedbackRow, PairRow, PromptItem, StepwiseRow, describe_findings, primary

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
NAME_COLUMNS = ["file", "source", "kind", "annotator", "reason", "policy"]
"""Features that have few different values."""
_TEXT_COLUMNS = ("annotator", "tools", "ground_truth", "data_source", "ability", "prompt_id")
_NUMBER_COLUMNS = ("margin", "chosen_score", "rejected_score", "label", "rating")


@dataclass
class ExampleColumns:
    """One chunk as columns, an entry an example."""

    number: int
    batch: Batch
    pair_kind: str
    """What the judgements of pairs are: `pair` or `ranked`."""
    numbers: dict[str, NDArray[Any]]
    """What `text_features` says."""
    group_texts: list[str | None]
    """The normalised prompts, system turns left out, as one text each."""
    group_digests: list[bytes | None]
    example_digests: list[bytes | None]

    @classmethod
    def of(cls, batch: Batch, number: int, pair_kind: str = "pair") -> ExampleColumns:
        numbers = text_features({part: column.texts for part, column in _parts(batch).items()})
        for place, part in cut_short(batch.rows):
            numbers[f"{part}_flags"][place] |= int(Flag.TRUNCATED)
        return cls(number, batch, pair_kind, numbers, *_groups(batch.prompts), _example_digests(batch))

    def contaminated(self, index: EvaluationIndex) -> list[int]:
        """Return the places of the examples that hold a prompt of the evaluation."""
        found = np.zeros(len(self.batch), np.bool_)
        for column in _parts(self.batch).values():
            found |= index.hits([text or "" for text in column.texts])
        return [int(place) for place in np.flatnonzero(found)]

    def with_secrets(self) -> list[int]:
        """Return the places of the examples in whose texts a secret stands."""
        flags = np.bitwise_or.reduce([np.ma.filled(self.numbers[f"{part}_flags"], 0) for part in PARTS])
        return [int(index) for index in np.flatnonzero(flags & int(Flag.SECRET))]

    def _attribute(self, name: str) -> list[Any] | None:
        """Return one field of every row, None where no row has it. Plain pairs have no more than their texts."""
        if not self.batch.rows:
            return None
        values: list[Any] = [None] * len(self.batch)
        for place, row in self.batch.rows.items():
            values[place] = getattr(row, name, None)
        return values

    def _kinds(self) -> list[str | None]:
        kinds: list[str | None] = ["pair"] * len(self.batch)
        for place, turns in self.batch.prompts.others.items():
            kinds[place] = None if turns is None else "pair"
        for place, row in self.batch.rows.items():
            kinds[place] = self.pair_kind if isinstance(row, PairRow) else KINDS[type(row)]
        return kinds

    def write_canonical(self, path: Path) -> Path:
        """Write the examples with what is wrong with them and with the rows as they were read."""
        batch = self.batch
        size = len(batch)
        columns: dict[str, Any] = {
            "example_id": _hexes(self.example_digests, _prompt_places(batch)),
            "source": batch.sources,
            "group_id": _hexes(self.group_digests),
            "label_kind": self._kinds(),
            "source_file": pa.repeat(batch.file, size),
            "source_row": batch.numbers,
            "extra": self._extra(),
            "byte_offset": batch.offsets,
            **{f"{part}_messages": column.messages() for part, column in _parts(batch).items()},
            **{name: self._attribute(name) for name in _TEXT_COLUMNS + _NUMBER_COLUMNS},
        }
        if batch.findings or batch.dropped:
            found, dropped = batch.findings, batch.dropped
            details = {place: item.detail for place, item in dropped.items()}
            details |= {place: describe_findings(findings) for place, findings in found.items()}
            columns["detail"] = [details.get(place) for place in range(size)]
        columns["raw"] = batch.raws
        write_arrow(table_of(columns, size, SPILL_SCHEMA), path)
        return path

    def _extra(self) -> list[str | None]:
        extra: list[str | None] = ["{}"] * len(self.batch)
        for place, row in self.batch.rows.items():
            extra[place] = _with_labels(row) if isinstance(row, StepwiseRow) else row.extra
        return extra

    def write_features(self, path: Path, sample_limit: int) -> tuple[Path, pa.Table]:
        """Write the numbers of the examples; return those that may be in the sample, texts included.

        Args:
            path: of the file.
            sample_limit: usable examples with a smaller or equal content hash may be in the sample.
        """
        batch, size = self.batch, len(self.batch)
        contents = list(self.example_digests)
        for place, row in batch.rows.items():
            if (value := contents[place]) is not None:
                contents[place] = content_digest(row, value)
        unusable = set(batch.findings) | set(batch.dropped)
        usable = np.ones(size, np.bool_)
        usable[list(unusable)] = False
        kinds, prompts = self._kinds(), self._prompt_digests()
        groups, hashes = _words(self.group_digests), _words(contents)
        columns: dict[str, Any] = {
            "example": (self.number << CHUNK_BITS) + np.arange(size, dtype=np.int64),
            "file": pa.repeat(batch.file, size),
            "row": np.array(batch.numbers, np.int64),
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
            "num_turns": _num_turns(batch.prompts),
            **self.numbers,
            **{name: self._attribute(name) for name in (*_NUMBER_COLUMNS, "chosen_position", "annotator")},
            "is_tie": _ties(batch),
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
        pq.write_table(table, path, compression="lz4", use_dictionary=NAME_COLUMNS, write_statistics=False)
        return path, self._candidates(table, sample_limit)

    def _candidates(self, features: pa.Table, limit: int) -> pa.Table:
        chosen = pc.and_(features["usable"], pc.less_equal(features["content_hash"], limit))
        places = np.flatnonzero(chosen.fill_null(False).to_numpy())
        table = features.take(pa.array(places))
        for part, column in _parts(self.batch).items():
            texts = [column.texts[place] for place in places.tolist()]
            table = table.append_column(f"{part}_text", pa.array(texts, pa.string()))
        return table

    def _prompt_id_keys(self) -> pa.Array | None:
        if (ids := self._attribute("prompt_id")) is None:
            return None
        return _signed([None if name is None else xxhash.xxh3_64_intdigest(name.encode()) for name in ids])

    def _prompt_digests(self) -> list[bytes | None]:
        """Return the digest of all turns of each prompt, system turns included."""
        others = self.batch.prompts.others
        if not any(turns and turns[0][0] == "system" for turns in others.values()):
            # A system turn elsewhere is an error of roles, and such a row is not usable.
            return self.group_digests
        digests = list(self.group_digests)
        for place, turns in others.items():
            if turns is not None and any(turn[0] == "system" for turn in turns):
                digests[place] = digest(normalised(turns))
        return digests

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
        table = sketch(list(texts.values()), keys)
        pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
        return path

    def write_prefixes(self, path: Path) -> Path | None:
        """Write, for each prompt of several turns, the keys of the prompts that it continues."""
        found: dict[tuple[bytes, bytes], None] = {}
        for place, turns in self.batch.prompts.others.items():
            value = self.group_digests[place]
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


def _parts(batch: Batch) -> dict[str, TurnColumn]:
    return {"prompt": batch.prompts, "chosen": batch.chosen, "rejected": batch.rejected}


def _groups(prompts: TurnColumn) -> tuple[list[str | None], list[bytes | None]]:
    """Return of each prompt without its system turns the normalised text, and the digest that its group id starts."""
    texts: list[str | None] = [*normalise_all([text or "" for text in prompts.texts])]
    known: dict[str | None, bytes] = {}  # One prompt often has several rows, and they often stand together.
    digests: list[bytes | None] = []
    for text in texts:
        if (value := known.get(text)) is None:
            value = known[text] = digest([[prompts.role, text]])
        digests.append(value)
    for place, turns in prompts.others.items():
        spoken = None if turns is None else normalised(turn for turn in turns if turn[0] != "system")
        texts[place] = None if spoken is None else "\n".join(content for _, content in spoken)
        digests[place] = None if spoken is None else digest(spoken)
    return texts, digests


def _example_digests(batch: Batch) -> list[bytes | None]:
    """Return `keys.example_digest` of each example, None for those without turns."""
    prompts, chosen, rejected = _parts(batch).values()
    special = prompts.others.keys() | chosen.others.keys() | rejected.others.keys()
    special |= {place for place, row in batch.rows.items() if not isinstance(row, PairRow)}
    digests: list[bytes | None]
    if len(special) < len(batch):
        digests = [*plain_digests(prompts.texts, chosen.texts, rejected.texts)]
    else:
        digests = [None] * len(batch)
    for place in special:
        prompt, row = prompts[place], batch.rows.get(place)
        digests[place] = (
            None
            if prompt is None
            else example_digest(prompt, chosen[place] or (), rejected[place], row and _judgement(row))
        )
    return digests


def _prompt_places(batch: Batch) -> set[int]:
    return {place for place, row in batch.rows.items() if isinstance(row, PromptItem)}


def _num_turns(prompts: TurnColumn) -> pa.Array:
    counts = np.ones(len(prompts), np.int32)
    mask = np.zeros(len(prompts), np.bool_)
    for place, turns in prompts.others.items():
        counts[place], mask[place] = len(turns or ()), turns is None
    return pa.array(counts, mask=mask)


def _ties(batch: Batch) -> pa.Array:
    """Return of each pair whether neither answer is preferred, null for what is no pair."""
    ties, mask = np.zeros(len(batch), np.bool_), np.zeros(len(batch), np.bool_)
    for place, turns in batch.rejected.others.items():
        mask[place] = turns is None
    for place, row in batch.rows.items():
        ties[place] = isinstance(row, PairRow) and row.is_tie
    return pa.array(ties, mask=mask)


def _judgement(row: Row | None) -> list[object] | None:
    return judgement_of(row) if isinstance(row, FeedbackRow | StepwiseRow) else None


def _with_labels(row: StepwiseRow) -> str:
    """Return the other columns with the steps' labels, for which there is no column."""
    return orjson.dumps({**orjson.loads(row.extra), "labels": list(row.labels)}, option=orjson.OPT_SORT_KEYS).decode()


def _hexes(digests: Sequence[bytes | None], without: Collection[int] = ()) -> list[str | None]:
    hexes = [None if value is None else value[:16].hex() for value in digests]
    for place in without:
        hexes[place] = None
    return hexes


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
