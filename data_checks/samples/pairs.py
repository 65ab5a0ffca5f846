"""The sample's pairs as numpy columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_checks.features.flags import Flag
from data_checks.samples.statistics import FloatArray, IntArray

COUNTS = ("characters", "words", "newlines", "bullets", "headers", "code_blocks", "bold", "emoji", "digits")
"""Columns of each answer that count something."""
MARKDOWN = ("bullets", "headers", "code_blocks", "bold")
MAX_CHARACTERS = 1000
"""How much of a text is read: of a prompt the end (its last turn), of an answer the start."""
FEATURES = (*COUNTS, "refusal", "truncation")
"""What the shortcut probe sees of an answer."""


@dataclass(frozen=True)
class Pairs:
    """Pairs in which one answer is preferred, in the order of their content hash."""

    example: IntArray
    """Ordinals of the examples."""
    cluster: IntArray
    """Key of the near-duplicate cluster of the prompt, or of the prompt where clusters are not known."""
    source: NDArray[Any]
    validation: NDArray[np.bool_]
    chosen: dict[str, FloatArray]
    """Feature -> value of the chosen answer."""
    rejected: dict[str, FloatArray]
    texts: pa.Table
    """Columns chosen_text and rejected_text."""

    def __len__(self) -> int:
        return len(self.example)

    @property
    def num_clusters(self) -> int:
        return len(np.unique(self.cluster))

    def difference(self, name: str) -> FloatArray:
        """Return a feature's value in the chosen answer minus that in the rejected one."""
        return self.chosen[name] - self.rejected[name]

    def markdown(self) -> FloatArray:
        """Return the difference of the number of bullets, headers, code blocks and bold spans together."""
        return np.asarray(np.sum([self.difference(name) for name in MARKDOWN], axis=0))


def in_stable_order(sample: pa.Table) -> pa.Table:
    """Return the sample with short texts, in an order that does not depend on how rows lay in their files."""
    for name in ("prompt_text", "chosen_text", "rejected_text"):
        start, stop = (-MAX_CHARACTERS, None) if name == "prompt_text" else (0, MAX_CHARACTERS)
        text = pc.utf8_slice_codeunits(sample[name].cast(pa.string()), start, stop)
        sample = sample.set_column(sample.column_names.index(name), name, text)
    return sample.sort_by([("content_hash", "ascending"), ("group_key", "ascending"), ("example", "ascending")])


def pairs_of(sample: pa.Table) -> Pairs:
    """Return the pairs of a sample (in stable order) that hold a preference: ties that were kept say nothing here."""
    mask = pc.and_(pc.is_valid(sample["chosen_text"]), pc.is_valid(sample["rejected_text"]))
    if "is_tie" in sample.column_names:
        mask = pc.and_(mask, pc.invert(pc.fill_null(sample["is_tie"], False)))
    rows = sample.filter(mask)
    validation = np.zeros(rows.num_rows, bool)
    if "split" in rows.column_names:
        validation = pc.fill_null(pc.equal(rows["split"], "validation"), False).to_numpy()
    return Pairs(
        example=numbers(rows, "example"),
        cluster=clusters_of(rows),
        source=sources_of(rows),
        validation=validation,
        chosen=answer_features(rows, "chosen"),
        rejected=answer_features(rows, "rejected"),
        texts=rows.select(["chosen_text", "rejected_text"]),
    )


def clusters_of(rows: pa.Table) -> IntArray:
    """Return the key of each row's cluster of near-duplicate prompts, that of its prompt where there is none."""
    prompts = numbers(rows, "group_key")
    if "cluster_key" not in rows.column_names:
        return prompts
    known = pc.is_valid(rows["cluster_key"]).to_numpy().astype(bool)
    return np.where(known, numbers(rows, "cluster_key"), prompts)


def sources_of(rows: pa.Table) -> NDArray[Any]:
    """Return the name of each row's data, empty where it has none."""
    return np.array(pc.fill_null(rows["source"], "").to_pylist(), dtype=object)


def answer_features(rows: pa.Table, side: str) -> dict[str, FloatArray]:
    """Return the trivial features of one side's answers, by name as in FEATURES."""
    features = {name: numbers(rows, f"{side}_{name}").astype(np.float64) for name in COUNTS}
    flags = numbers(rows, f"{side}_flags")
    features["refusal"] = ((flags & Flag.REFUSAL) != 0).astype(np.float64)
    features["truncation"] = ((flags & Flag.TRUNCATED) != 0).astype(np.float64)
    return features


def numbers(rows: pa.Table, name: str) -> IntArray:
    """Return a column of integers, 0 where it is null."""
    return np.asarray(pc.fill_null(rows[name], 0), dtype=np.int64)
