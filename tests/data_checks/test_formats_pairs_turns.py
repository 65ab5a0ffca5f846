"""Columns to turns: roles, parts, transcripts, and the columns that no field holds."""

from __future__ import annotations

import json
import math
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_fixtures import convert, plain

from data_checks.formats import RowError, split_transcript
from data_checks.formats.markers import HH_MARKER, HH_ROLES
from data_checks.formats.turns import ROLE_TABLE, as_turns, extra_of, json_text
from data_checks.rows import ROLES, Turn, Turns


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("human", "user"),
        ("gpt", "assistant"),
        ("observation", "tool"),
        ("function_call", "assistant"),
        ("developer", "system"),
        ("tool", "tool"),
        ("user", "user"),
    ],
)
def test_roles_go_through_one_table(theirs: str, ours: str) -> None:
    assert as_turns([{"role": theirs, "content": "a"}], "c", "user") == (Turn(ours, "a"),)
    assert as_turns([{"from": theirs, "value": "a"}], "c", "user") == (Turn(ours, "a"),)
    assert set(ROLE_TABLE.values()) == set(ROLES)


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ("text", r"c\[0\] is text, not a message with role and content"),
        ({"role": "narrator", "content": "x"}, r"c\[0\] has an unknown role; allowed: system, developer"),
        ({"role": 3, "content": "x"}, r"c\[0\] has a number as role"),
        ({"content": "x"}, r"c\[0\] has null or missing as role"),
        ({"role": "user"}, r"c\[0\] has null or missing as content, not text"),
        ({"role": "user", "text": "x"}, r"c\[0\] has text, which would be lost"),
        ({"role": "user", "content": {"a": 1}}, r"c\[0\] has an object as content, not text"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, r"c\[0\] has tool_calls, which would be lost"),
        ({"from": "human", "value": "x", "content": "y"}, r"c\[0\] has content, which would be lost"),
        ({"role": "user", "content": ["x"]}, r"c\[0\]\.content\[0\] is text, not a part with type and text"),
        ({"role": "user", "content": [{"type": "image"}]}, r"content\[0\] is no text: only the text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, r"content\[0\] has a number as text"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] has not one of text and value"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "value": "y"}]}, "has not one of text and value"),
        ({"role": "user", "content": [{"text": "x", "style": "bold"}]}, r"content\[0\] has style, which would be lost"),
    ],
)
def test_what_would_be_lost_is_refused(message: Any, detail: str) -> None:
    with pytest.raises(RowError, match=detail):
        as_turns([message], "c", "user")


def test_parts_of_text_are_joined_and_null_keys_are_no_loss() -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a "}, {"type": "text", "value": "b", "text": None}],
        "tool_calls": None,
    }
    assert as_turns([message, {"role": "assistant", "content": []}], "c", "user") == (
        Turn("user", "a b"),
        Turn("assistant", ""),
    )
    assert as_turns([{"role": "user", "content": "a", "weight": 1}], "c", "user", ("weight",)) == (Turn("user", "a"),)
    with pytest.raises(RowError, match="c is a number, not text or a list of messages"):
        as_turns(3, "c", "user")


def by_pattern(text: str) -> Turns:
    """Return what the markers' definition says."""
    markers = list(HH_MARKER.finditer(text))
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    return tuple(
        Turn(HH_ROLES[marker[1]], text[marker.end() : end].removeprefix(" "))
        for marker, end in zip(markers, ends, strict=True)
    )


pieces = st.lists(
    st.sampled_from(["\n\nHuman:", "\n\nAssistant:", "\n", " ", "a", "Human:", "Assistant:", "\n\n", ":", "b c"]),
    max_size=12,
).map("".join)


@given(pieces)
def test_transcripts_are_cut_where_the_pattern_finds_markers(text: str) -> None:
    if HH_MARKER.match(text):
        assert split_transcript(text) == by_pattern(text)
    else:
        with pytest.raises(RowError, match="does not start with a Human or Assistant marker"):
            split_transcript(text)


@given(pieces, pieces, pieces)
def test_both_sides_are_cut_as_each_alone(head: str, first: str, second: str) -> None:
    start = "\n\nHuman: x" + head
    chosen, rejected = start + first, start + second
    pair = convert({"chosen": chosen, "rejected": rejected}, "hh")[0]
    sides = by_pattern(chosen), by_pattern(rejected)
    assert (pair.chosen_prompt, pair.chosen) == (sides[0][:-1], sides[0][-1:])
    assert (pair.rejected_prompt, pair.rejected) == (sides[1][:-1], sides[1][-1:])


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_texts_come_out_as_they_went_in(prompt: str, chosen: str, rejected: str) -> None:
    for beside in ({}, {"id": 1}):
        pair = convert({"prompt": prompt, "chosen": chosen, "rejected": rejected, **beside}, "pairs")[0]
        assert plain(pair.prompt) == plain(pair.rejected_prompt) == (("user", prompt),)
        assert (plain(pair.chosen), plain(pair.rejected)) == ((("assistant", chosen),), (("assistant", rejected),))
        assert json.loads(pair.extra) == beside


def test_other_columns_are_sorted_json() -> None:
    value = {"b": [1, None], "a": {"z": "ü", "y": math.nan}, "prompt": "p", "day": date(2024, 5, 1)}
    assert extra_of(value, ("prompt",)) == '{"a":{"y":null,"z":"ü"},"b":[1,null],"day":"2024-05-01"}'
    assert extra_of({"prompt": "p"}, ("prompt",)) == "{}"
    assert extra_of(dict(reversed(value.items())), ("prompt",)) == extra_of(value, ("prompt",))
    assert json_text({"n": 2**80, "null": None}, "it") == f'{{"n":{2**80},"null":null}}'


@pytest.mark.parametrize("item", [math.inf, [None, -math.inf], "\ud800", {"a": "\udfff"}], ids=range(4))
def test_what_is_no_json_is_refused_without_its_value(item: Any) -> None:
    with pytest.raises(RowError, match=r"^it cannot be written as JSON") as caught:
        json_text({"column": item}, "it")
    assert "d800" not in str(caught.value)
    assert "column" not in str(caught.value)


def test_deep_columns_are_written_or_refused() -> None:
    for depth, is_written in ((200, True), (400, True), (100_000, False)):
        value: Any = "x"
        for _ in range(depth):
            value = [value]
        if is_written:
            assert json_text(value, "it") == "[" * depth + '"x"' + "]" * depth
        else:
            with pytest.raises(RowError, match="cannot be written as JSON"):
                json_text(value, "it")
