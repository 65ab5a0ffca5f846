"""Nearly equal prompts: what is found, what is not, and that templates do not chain into one cluster."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_checks.whole import near_duplicates as near
from data_checks.whole import sketches
from data_checks.whole.sketches import SIGNATURE_HASHES, SKETCH_SCHEMA, similarities, sketch
from data_checks.whole.store import open_store

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def shingles(text: str) -> set[str]:
    return {text[start : start + 5] for start in range(max(1, len(text) - 4))}


def jaccard(first: str, second: str) -> float:
    one, two = shingles(first), shingles(second)
    return len(one & two) / len(one | two)


def words(number: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(2, 9))) for _ in range(number)]


def prompts(number: int, num_words: int, seed: int = 0) -> list[str]:
    draw, known = random.Random(seed), words(2000)
    return list(dict.fromkeys(" ".join(draw.choices(known, k=num_words)) for _ in range(number)))


def edited(text: str, draw: random.Random) -> str:
    """Return a text with a character inserted, removed or replaced."""
    place = draw.randrange(len(text))
    kind = draw.choice("irs")
    return text[:place] + ("" if kind == "r" else draw.choice(LETTERS)) + text[place + (kind != "i") :]


def keys_of(texts: Sequence[str], seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, len(texts))


class Found:
    """What `cluster_prompts` makes of texts that lie in several files."""

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str],
        similarity: float | None = 0.8,
        *,
        per_file: int = 10_000,
        usable: slice = slice(None),
        prefixes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.keys = keys_of(texts)
        paths = []
        for start in range(0, len(texts), per_file):
            paths.append(folder / f"{start}.sketches.parquet")
            pq.write_table(sketch(texts[start : start + per_file], self.keys[start : start + per_file]), paths[-1])
        continued = []
        if prefixes:
            continued.append(folder / "prefixes.parquet")
            groups, shorter = ([int(self.keys[pair[side]]) for pair in prefixes] for side in (0, 1))
            pq.write_table(pa.table({"group_key": groups, "prefix_key": shorter}), continued[0])
        self.connection: duckdb.DuckDBPyConnection = open_store(folder, 256 << 20, 2)
        self.connection.register("usable", pa.table({"group_key": self.keys[usable]}))
        self.connection.execute("create table groups as select * from usable")
        self.table = near.cluster_prompts(self.connection, paths, continued, similarity)
        place = {int(key): index for index, key in enumerate(self.keys)}
        found = zip(self.table["group_key"].to_pylist(), self.table["cluster_key"].to_pylist(), strict=True)
        self.clusters = {place[group]: cluster for group, cluster in found}
        rows = self.connection.sql("select * from near_pairs").fetchall()
        self.pairs = [(place[first], place[second], strength) for first, second, strength in rows]

    def together(self, first: int, second: int) -> bool:
        return first in self.clusters and self.clusters[first] == self.clusters.get(second)


@pytest.mark.parametrize(("num_words", "least"), [(8, 0.995), (25, 0.98)])
def test_edited_prompts_are_found_and_no_others(tmp_path: Path, num_words: int, least: float) -> None:
    draw = random.Random(2)
    texts = prompts(2000, num_words)
    number = len(texts)
    texts += [edited(text, draw) for text in texts]
    found = Found(tmp_path, texts, per_file=700)
    near_ones = [
        n for n in range(number) if texts[n] != texts[n + number] and jaccard(texts[n], texts[n + number]) >= 0.8
    ]
    assert len(near_ones) > 1000
    assert np.mean([found.together(n, n + number) for n in near_ones]) >= least
    measured = np.array([(jaccard(texts[a], texts[b]), strength) for a, b, strength in found.pairs])
    assert np.mean(measured[:, 0] >= 0.8) >= 0.99
    if num_words == 8:  # Whole sets of shingles: nothing is estimated.
        np.testing.assert_allclose(measured[:, 0], measured[:, 1])


def test_how_probable_it_is_to_share_a_band() -> None:
    """1 - (1 - J^5)^16 where a text has many shingles; at least as good from 0.8 on where it has 46."""
    rng = np.random.default_rng(0)
    for size, similarity, expected in ((400, 0.5, 0.398), (400, 0.7, 0.947), (46, 0.8, 0.998), (46, 0.9, 1.0)):
        union = round(2 * size / (1 + similarity))
        both = round(similarity * union)
        trials = 1500
        hashes = np.sort(rng.integers(0, 2**32, (trials, union)), axis=1).astype(np.uint32)
        owner = rng.permuted(np.tile(np.arange(union), (trials, 1)), axis=1)
        bands = []
        for side in (0, 1):
            mask = (owner < both) | ((owner - both) % 2 == side)
            counts = mask.sum(axis=1)
            bands.append(sketches._bands(hashes[mask], np.cumsum(counts) - counts, counts))
        assert float((bands[0] == bands[1]).any(axis=1).mean()) == pytest.approx(expected, abs=0.04)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text("ab\U0001f600é ", max_size=14), min_size=1, max_size=8))
def test_short_texts_are_compared_exactly(texts: list[str]) -> None:
    table = sketch(texts, np.arange(len(texts)))
    assert table["num_shingles"].to_pylist() == [len(shingles(text)) for text in texts]
    pairs = [(a, b) for a in range(len(texts)) for b in range(len(texts))]
    first, second = table.take([a for a, _ in pairs]), table.take([b for _, b in pairs])
    got = similarities(
        *(side[name].combine_chunks() for name in ("num_shingles", "signature") for side in (first, second))
    )
    np.testing.assert_allclose(got, [jaccard(texts[a], texts[b]) for a, b in pairs])


def test_long_texts_are_estimated() -> None:
    base = " ".join(words(900, seed=4))
    others = [base[: len(base) * part // 10] + " ".join(words(90 * (10 - part), seed=part)) for part in range(4, 10)]
    table = sketch([base, *others], np.arange(7))
    assert min(table["num_shingles"].to_pylist()) > SIGNATURE_HASHES
    first, second = table.take([0] * 6), table.slice(1)
    got = similarities(
        *(side[name].combine_chunks() for name in ("num_shingles", "signature") for side in (first, second))
    )
    expected = np.array([jaccard(base, other) for other in others])
    assert np.abs(got - expected).max() < 4 * 0.5 / SIGNATURE_HASHES**0.5
    assert np.abs(got - expected).max() > 0


def test_a_sketch_depends_on_its_text_alone() -> None:
    texts = ["", "hi", "a" * 100_000, *prompts(200, 9), "ünïcödé text with 日本語 inside", "x\ud800y lone surrogate"]
    keys = keys_of(texts)
    whole = sketch(texts, keys)
    assert whole.schema == SKETCH_SCHEMA
    for index in (0, 1, 2, 50, len(texts) - 2, len(texts) - 1):
        alone = sketch([texts[index]], keys[index : index + 1])
        assert alone.to_pylist() == whole.slice(index, 1).to_pylist()
    assert whole["num_shingles"].to_pylist()[:3] == [1, 1, 1]
    assert sketch([], np.empty(0, np.int64)).num_rows == 0
    with pytest.raises(ValueError, match="2 texts with 1 keys"):
        sketch(["a", "b"], np.zeros(1, np.int64))


def test_a_template_is_no_duplicate_and_chains_into_no_giant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that differ in a number chain from one to the next: no cluster grows above a hundredth of them."""
    poems = [
        f"write a poem about {first} {second}" for first, second in zip(words(1500, 7), words(1500, 8), strict=True)
    ]
    numbers = [f"please explain the meaning of number {number}" for number in range(1500)]
    found = Found(tmp_path, [*poems, *numbers])
    sizes = Counter(found.clusters.values())
    assert len(found.pairs) > 1000
    assert max(sizes.values()) <= 30
    assert sum(index < len(poems) for index in found.clusters) < 0.05 * len(poems)
    assert sum(index >= len(poems) for index in found.clusters) > 0.8 * len(numbers)
    monkeypatch.setattr(near, "MAX_CLUSTER_FRACTION", 1.0)
    assert max(Counter(Found(tmp_path, [*poems, *numbers]).clusters.values()).values()) > 100


def test_rows_that_do_not_count_connect_nothing(tmp_path: Path) -> None:
    text = prompts(1, 12)[0]
    middle, end = text[:-2] + "zq", text[:-2] + "zqxj"
    assert Found(tmp_path, [text, text + "a", middle]).together(0, 1)
    assert Found(tmp_path, [text, end, text + "a"], usable=slice(0, 1)).clusters == {}


def test_what_is_found_does_not_depend_on_files_nor_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    texts = prompts(300, 8)
    texts = [*texts, *(edited(text, draw) for text in texts), *(f"what is {number} plus one?" for number in range(300))]
    expected = Found(tmp_path, texts)
    assert expected.table == Found(tmp_path, texts, per_file=50).table
    # A prompt of several files counts once; few bands fit into memory.
    again = Found(tmp_path, texts, per_file=100)
    paths = [tmp_path / f"{start}.sketches.parquet" for start in (300, 0, 100, 0, 200, *range(400, len(texts), 100))]
    assert near.cluster_prompts(again.connection, paths, [], 0.8) == expected.table
    monkeypatch.setattr(near, "NUMBERS_AT_ONCE", 4000)
    monkeypatch.setattr(near, "PAIRS_AT_ONCE", 64)
    bounded = Found(tmp_path, texts)
    clusters = [
        {frozenset(n for n in f.clusters if f.clusters[n] == c) for c in f.clusters.values()}
        for f in (bounded, expected)
    ]
    alike = clusters[0] & clusters[1]
    assert len(alike) > 0.9 * len(clusters[1])


def test_depths_of_one_dialogue_stay_together(tmp_path: Path) -> None:
    """0 <- 1 <- 2 is one dialogue, 3 another with a prefix that is no row's prompt, 4 a stranger."""
    texts = [f"prompt {word}" for word in words(6, seed=9)]
    prefixes = [(1, 0), (2, 0), (2, 1), (3, 5), (4, 5)]
    found = Found(tmp_path, texts, None, prefixes=prefixes, usable=slice(0, 5))
    assert set(found.clusters) == {0, 1, 2}
    assert set(found.clusters.values()) == {int(found.keys[:3].min())}
    assert {(min(a, b), max(a, b)) for a, b, _ in found.pairs} == {(0, 1), (1, 2)}
    assert all(strength == 2 for *_, strength in found.pairs)


def test_a_greeting_joins_no_thousand_dialogues(tmp_path: Path) -> None:
    """Of 200 prompts, 60 begin with prompt 0; dialogue 1 -> 2 -> 3 among them stays whole."""
    texts = prompts(200, 10)
    prefixes = [(n, 0) for n in range(1, 60)] + [(2, 1), (3, 1), (3, 2)]
    found = Found(tmp_path, texts, None, prefixes=prefixes)
    assert max(Counter(found.clusters.values()).values()) <= near.MIN_MAX_CLUSTER
    assert found.together(1, 2)
    assert found.together(2, 3)


def test_a_near_duplicate_of_a_continuation_joins_its_dialogue(tmp_path: Path) -> None:
    texts = prompts(3, 12)
    found = Found(tmp_path, [*texts, texts[1] + "!"], prefixes=[(1, 0)])
    assert set(found.clusters) == {0, 1, 3}
    assert len(set(found.clusters.values())) == 1


def test_strongest_pairs_join_first() -> None:
    first, second = np.array([1, 2, 1, 4]), np.array([2, 3, 3, 5])
    assert near.clusters_of(first, second, 3).to_pydict()["cluster_key"] == [1, 1, 1, 4, 4]
    bounded = near.clusters_of(first, second, 2).to_pydict()
    assert bounded == {"group_key": [1, 2, 4, 5], "cluster_key": [1, 1, 4, 4]}


def test_nothing_found_is_a_table_without_rows(tmp_path: Path) -> None:
    for texts, similarity in (([], 0.8), (["one prompt"], 0.8), (prompts(20, 8), None)):
        found = Found(tmp_path, texts, similarity)
        assert found.table.num_rows == 0
        assert found.table.schema == near.CLUSTER_SCHEMA
        assert found.pairs == []
