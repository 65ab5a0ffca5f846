"""Evaluation prompts inside training texts, and prompts that say the same in other words."""

from __future__ import annotations

import logging
import pickle
import random
import re
import socket
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_checks.config import Contamination
from data_checks.whole import contamination, semantic
from data_checks.whole.contamination import EvaluationIndex
from data_checks.whole.word_runs import word_runs

QUESTION = (
    "A baker sells 48 loaves in the morning and half as many in the afternoon. How many loaves does the baker sell "
    "altogether, and how much money is made when each loaf costs 3 coins?"
)
FILLER = "Completely different words stand here, which nobody would ever take for that question about a bakery. "


def plain_words(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[぀-ヿ㐀-鿿]|(?:(?![぀-ヿ㐀-鿿])[^\W_])+", folded)


def plain_hits(prompts: Sequence[str], texts: Sequence[str], config: Contamination) -> list[bool]:
    """Do by sets of words what the index does by hashes."""

    def sequences(words: list[str], length: int) -> set[tuple[str, ...]]:
        return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}

    def holds(text: list[str], prompt: list[str]) -> bool:
        if len(prompt) < config.ngram_words:
            is_long = len(" ".join(prompt)) >= contamination.MIN_CHARACTERS
            return bool(prompt) and (text == prompt or (is_long and tuple(prompt) in sequences(text, len(prompt))))
        own = sequences(prompt, config.ngram_words)
        shared = len(own & sequences(text, config.ngram_words))
        return shared > 0 and shared >= config.containment * len(own)

    known = [plain_words(prompt) for prompt in prompts]
    return [any(holds(plain_words(text), prompt) for prompt in known) for text in texts]


def hits(prompts: Sequence[str], texts: Sequence[str], containment: float = 0.5) -> list[bool]:
    found: list[bool] = EvaluationIndex.of(prompts, Contamination(containment=containment)).hits(texts).tolist()
    return found


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        QUESTION.upper(),
        "\n".join(QUESTION.split()),  # One word a line.
        re.sub(r"(\S+ \S+ \S+ \S+ \S+ \S+ \S+ \S+) ", r"\1\n", QUESTION),  # Lines of eight words.
        QUESTION.replace(",", " --").replace(".", "\u2026").replace("?", ""),
        QUESTION.replace(" ", "\u00a0\t"),
        FILLER * 40 + QUESTION + FILLER * 40,  # Embedded in a document a hundred times as long.
        "> " + QUESTION.replace(". ", ".\n> ") + "\n\nAnswer: 72",
        QUESTION[: len(QUESTION) * 2 // 3],
    ],
    ids=["same", "capitals", "word-lines", "eight-lines", "punctuation", "spaces", "embedded", "quoted", "two-thirds"],
)
def test_a_prompt_is_found_however_it_is_laid_out(text: str) -> None:
    assert hits(["Which of the seven seas is the one that ships cross least often?", QUESTION], [text, FILLER]) == [
        True,
        False,
    ]


def test_the_share_is_of_the_evaluations_sequences() -> None:
    number = len(plain_words(QUESTION)) - 7
    for share, kept in ((0.5, 0.5), (0.9, 0.9), (1.0, 1.0)):
        words = plain_words(QUESTION)
        enough = -(-number * kept // 1) + 7
        texts = [" ".join(words[: int(enough)]), " ".join(words[: int(enough) - 1])]
        assert hits([QUESTION], texts, containment=share) == [True, False]
    assert hits([QUESTION], [" ".join(plain_words(QUESTION)[:8]), FILLER], containment=0) == [True, False]


def test_short_prompts_count_whole_or_when_they_are_long_enough() -> None:
    short, long = "What is 2 + 2?", "Antidisestablishmentarianism versus floccinaucinihilipilification?"
    assert hits([short], ["what is 2 2", "Well: what is 2 + 2? It is four.", "what is 2"]) == [True, False, False]
    assert hits([long], [f"Discuss {long.lower()} at length", "antidisestablishmentarianism versus"]) == [True, False]
    assert hits(["", " ?! "], ["", "...", "text"]) == [False, False, False]


def test_scripts_without_spaces() -> None:
    question = "日本で一番高い山は何ですか。その高さも教えてください。"
    assert hits([question], ["質問:" + question.replace("。", "\n"), "日本で一番長い川は何ですか"]) == [True, False]


def test_a_sequence_crosses_no_border_between_texts() -> None:
    words = plain_words(QUESTION)
    halves = [" ".join(words[:7]), " ".join(words[7:14]), " ".join(words[14:21]), " ".join(words[21:])]
    assert hits([QUESTION], halves) == [False, False, False, False]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), length=st.integers(3, 5), share=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_like_sets_of_words(data: st.DataObject, length: int, share: float) -> None:
    text = st.lists(st.sampled_from(["a", "b", "c", "d", "山", "É", "x" * 30]), max_size=14).map(" ".join)
    prompts, texts = data.draw(st.lists(text, max_size=5)), data.draw(st.lists(text, max_size=6))
    config = Contamination(ngram_words=length, containment=share)
    index = EvaluationIndex.of(prompts, config)
    expected = plain_hits(prompts, texts, config)
    assert index.hits(texts).tolist() == expected
    assert [bool(index.hits([text])[0]) for text in texts] == expected


def test_many_texts_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    known = [f"word{number}" for number in range(40)]
    # All prompts open with the same words: a template, whose sequences are in every one.
    prompts = [
        "answer the question below with one single word only please " + " ".join(draw.choices(known, k=9))
        for _ in range(60)
    ]
    texts = [*prompts[:10], *(" ".join(draw.choices(known, k=30)) for _ in range(50)), prompts[20][30:] + " and more"]
    texts += ["answer the question below with one single word only please now"]
    index = EvaluationIndex.of(prompts, Contamination())
    expected = plain_hits(prompts, texts, Contamination())
    assert index.hits(texts).tolist() == expected
    assert sum(expected) == 11
    monkeypatch.setattr(contamination, "CHARACTERS_AT_ONCE", 100)
    monkeypatch.setattr(contamination, "ENTRIES_AT_ONCE", 3)
    assert pickle.loads(pickle.dumps(index)).hits(texts).tolist() == expected


def test_the_index_holds_no_text() -> None:
    held = pickle.dumps(EvaluationIndex.of([QUESTION], Contamination()))
    assert b"baker" not in held
    assert b"loaves" not in held


def test_words_do_not_depend_on_their_neighbours() -> None:
    texts = ["The naïve café — it's ２ o'clock", "plain ascii words", "", "日本 x", "e\u0301te\u0301 \ud800"]
    together = word_runs(texts)
    for place, text in enumerate(texts):
        alone = word_runs([text])
        mine = slice(together.starts[place], together.starts[place + 1])
        np.testing.assert_array_equal(together.hashes[mine], alone.hashes)
        assert together.wholes()[place] == alone.wholes()[0]
        words = plain_words(text)
        assert together.counts[place] == len(words)
    assert together.characters[1] == len("plain ascii words")


def test_other_words_for_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The embeddings come from a file: no connection is tried, and nothing is logged."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was tried"))
    france = "What is the capital of France?"
    prompts = ["How do I bake bread at home?", "how do i bake a bread at home", france, "", france]
    with caplog.at_level(logging.DEBUG):
        found = semantic.semantic_duplicates_fraction(prompts)
    assert found == pytest.approx(1 / 3)
    assert caplog.records == []
    assert "wordllama" not in sys.modules
    assert semantic.semantic_duplicates_fraction([]) == semantic.semantic_duplicates_fraction([""]) == 0.0


def test_blocks_of_prompts_are_compared_with_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    vectors[30] = 2 * vectors[1]
    monkeypatch.setattr(semantic, "embed", lambda _: vectors)
    cosines = (vectors @ vectors.T) / np.outer(np.linalg.norm(vectors, axis=1), np.linalg.norm(vectors, axis=1))
    expected = np.mean([bool((cosines[row, :row] >= 0.9).any()) for row in range(50)])
    assert expected > 0
    for rows in (7, 1000):
        monkeypatch.setattr(semantic, "ROWS_AT_ONCE", rows)
        assert semantic.semantic_duplicates_fraction([str(n) for n in range(50)]) == pytest.approx(expected)
    monkeypatch.setattr(semantic, "MAX_PROMPTS", 49)
    with pytest.raises(ValueError, match="50 prompts: at most 49"):
        semantic.semantic_duplicates_fraction([str(n) for n in range(50)])
