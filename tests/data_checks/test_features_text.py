"""Numbers and flags of a chunk: alignment, nulls, counts, and independence of what stands beside a text."""

import random
import time

import numpy as np
import pyarrow as pa
import pytest

from data_checks.features import PATTERNS, Flag, describe, text_features
from data_checks.features.column import TextColumn
from data_checks.features.text import ANYWHERE, IN_ANSWERS

TEXTS = [
    "Plain words.",
    "",
    "Write to jo@example.org",
    "Line one\nline two\n\n- a\n* b\n1. c\n2) d\n  • e\n-not an item\n1.5 neither",
    "# Title\n## Sub\n#tag\n**bold** and **two words** but 2**3 and 4**5\n这是**粗体**",
    "```py\nx = 1\n```\nand `inline`",
    "Great 👍🏽 family 👨‍👩‍👧 flag 🇩🇪🇫🇷 key 1️⃣ heart ❤️ star ⭐",
    "Ünïcödé text with\u00a0no-break\u3000wide spaces",
    "日本語のテキスト。",
    "phone 1 2 3, 45",
    "naïve\x1bcafé",
]


def features_of(chosen, prompt=None, rejected=None):
    size = len(chosen)
    return text_features({"prompt": prompt or [None] * size, "chosen": chosen, "rejected": rejected or [None] * size})


def flags_of(text):
    return describe(int(features_of([text])["chosen_flags"][0]))


def test_values_of_flags_are_those_that_files_hold():
    assert {flag.name: flag.value for flag in Flag} == {
        "MOJIBAKE": 1, "CONTROL": 2, "INVISIBLE": 4, "MARKER": 8, "SECRET": 16, "EMAIL": 32, "PHONE": 64,
        "IDENTITY_NUMBER": 128, "REFUSAL": 256, "TRUNCATED": 512, "IP_ADDRESS": 1024,
    }  # fmt: skip


def test_every_flag_is_described_in_the_table_for_the_docs():
    assert [pattern.name for pattern in PATTERNS] == describe(sum(Flag))
    assert all(pattern.what and pattern.why for pattern in PATTERNS)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("words", [2, 0, 3, 19, 14, 7, 12, 6, 1, 5, 1]),
        ("newlines", [0, 0, 0, 9, 4, 3, 0, 0, 0, 0, 0]),
        ("bullets", [0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]),
        ("headers", [0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]),
        ("bold", [0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0]),
        ("code_blocks", [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]),
        ("emoji", [0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0]),
        ("digits", [0, 0, 0, 4, 4, 1, 1, 0, 0, 5, 0]),
        ("characters", [len(text) for text in TEXTS]),
    ],
)
def test_counts_of_answers(column, expected):
    assert features_of(TEXTS)[f"chosen_{column}"].tolist() == expected


def test_words_are_those_that_python_splits():
    rng = random.Random(3)
    alphabet = "ab \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200bé"
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(12))) for _ in range(500)]
    assert features_of(texts)["chosen_words"].tolist() == [len(text.split()) for text in texts]


def test_columns_and_types():
    features = text_features({"prompt": ["p"], "chosen": ["c"], "rejected": ["r"]})
    counts = ("words", "newlines", "bullets", "headers", "code_blocks", "bold", "emoji", "digits")
    expected = {f"{part}_{name}" for part in ("prompt", "chosen", "rejected") for name in ("flags", "characters")}
    assert set(features) == expected | {f"{side}_{count}" for side in ("chosen", "rejected") for count in counts}
    assert {values.dtype for values in features.values()} == {np.dtype(np.int32)}


def test_a_missing_text_is_null_in_arrow():
    features = text_features({"prompt": ["a", None], "chosen": [None, "b c"], "rejected": ["", "d"]})
    assert pa.array(features["prompt_characters"]).to_pylist() == [1, None]
    assert pa.array(features["chosen_words"]).to_pylist() == [None, 2]
    assert pa.array(features["chosen_flags"]).to_pylist() == [None, 0]
    assert pa.array(features["rejected_words"]).to_pylist() == [0, 1]


def test_each_part_has_its_own_flags():
    texts = {"prompt": ["a\x07"], "chosen": ["jo@example.org"], "rejected": ["I'm sorry, but I can't help with that."]}
    features = text_features(texts)
    found = {part: describe(int(features[f"{part}_flags"][0])) for part in texts}
    assert found == {"prompt": ["control"], "chosen": ["email"], "rejected": ["refusal"]}


def test_a_prompt_is_neither_a_refusal_nor_truncated():
    text = "I'm sorry, but I can't help with that.\n```py\nx = 1"
    features = text_features({"prompt": [text], "chosen": [text], "rejected": [None]})
    assert describe(int(features["prompt_flags"][0])) == []
    assert describe(int(features["chosen_flags"][0])) == ["refusal", "truncated"]


def test_what_is_found_does_not_depend_on_the_chunk():
    rng = random.Random(5)
    pieces = [
        *TEXTS,
        "4111 1111",
        " 1111 1111",
        "93.184",
        ".216.34",
        "sk-",
        "\ufffd",
        "Ã©",
        "<|",
        "|>",
        "+1 202-456-",
        "1111",
    ]
    texts = [rng.choice(pieces) + rng.choice(pieces) for _ in range(300)]
    whole = features_of(texts)
    for size in (1, 7):
        parts = [features_of(texts[start : start + size]) for start in range(0, len(texts), size)]
        for name in (name for name in whole if name.startswith("chosen")):
            assert np.concatenate([part[name] for part in parts]).tolist() == whole[name].tolist(), name


def test_the_quick_looks_lose_nothing_that_the_precise_ones_find():
    rng = random.Random(9)
    pieces = [
        *TEXTS, "Â©", "â€™", "\x85", "\u200b", "می\u200cخ", "<s>", "</s>", "[INST]", "<pad>",
        "AKIA" + "QWERTY234567ASDF",
        "password='Ab1$efgh'", "jo@example.org", "call 020 7946 0958", "(202) 456-1111", "4111-1111-1111-1111",
        "536-22-8726", "GB82 WEST 1234 5698 7654 32", "93.184.216.34", "2a00:1450:4001:81b::200e",
        "I can't help with that",
        "As an AI, I", "not something I can", "```py", "\n3. ", "\n2. two", "\n- ", "word " * 20, ",", "the", ".",
    ]  # fmt: skip
    texts = ["".join(rng.choice(["", " ", "\n"]) + rng.choice(pieces) for _ in range(6)) for _ in range(1500)]
    found = features_of(texts, texts)
    seen = 0
    for row, text in enumerate(texts):
        anywhere = sum(detector.flag for detector in ANYWHERE if detector.confirm(text))
        in_answers = sum(detector.flag for detector in IN_ANSWERS if detector.confirm(text))
        assert (found["prompt_flags"][row], found["chosen_flags"][row]) == (anywhere, anywhere | in_answers), text
        seen |= anywhere | in_answers
    assert seen == sum(Flag)


def test_no_rows_and_lone_surrogates():
    assert all(len(values) == 0 for values in features_of([]).values())
    features = features_of(["a\ud800b", "c"])
    assert features["chosen_characters"].tolist() == [3, 1]


def test_parts_of_different_lengths_are_an_error():
    with pytest.raises(ValueError, match="1, 2, 1 texts"):
        text_features({"prompt": ["a"], "chosen": ["b", "c"], "rejected": ["d"]})


def test_the_quick_look_misses_no_digits():
    texts = ["a" * place + "1 2 3 4" + "b" for place in range(5)] + ["12", "34", "1" + "x" * 30 + "234"]
    # What stands beside may add a text (the first digit of the last one ends a window), never take one away.
    assert set(TextColumn(texts).digits_within(4, 8).tolist()) >= {0, 1, 2, 3, 4}
    assert TextColumn(["1234", "x" * 9, "12 34 5", "1" + "x" * 9 + "234"]).digits_within(4, 4).tolist() == [0]


@pytest.mark.parametrize(
    "text",
    [
        "<s>" * 20_000,
        "a@" * 50_000,
        "1.2." * 30_000,
        "eyJ" * 40_000,
        "+1 " * 40_000,
        "```" * 30_001,
        "password" * 12_000 + "=",
        "-----BEGIN PRIVATE KEY-----" + "a: b " * 20_000,
        "-----BEGIN PRIVATE KEY-----" + " \n" * 40_000,
        "می\u200c" * 30_000,
        "\u200f\u200b" * 30_000,
        "Ã\x89" * 30_000 + "\x81",
        "GB82 " * 20_000,
        "\n- " * 30_000,
        "://a:" * 20_000,
    ],
    ids=lambda text: ascii(text[:8]),
)
def test_long_repetitions_take_no_longer_than_their_length_explains(text):
    start = time.process_time()
    features_of([text], [text])
    assert time.process_time() - start < 3
