"""Rows with anything in any place: each becomes an example or a reason, and no text of it stands in a message."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_fixtures import FOLDER, convert, load

from data_checks.detection import detect
from data_checks.formats import RowError
from data_checks.formats.registry import PAIR_FORMATS
from data_checks.rows import Dropped, PairRow
from data_checks.rules import pair_findings
from training_core.errors import ConfigurationError, DataError

CANARY = "canary-7261"
NAMES = sorted(path.stem.removeprefix("pairs_") for path in FOLDER.glob("pairs_*"))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 12),
    st.just(10**400),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([CANARY, "\n\nHuman: a\n\nAssistant:", "N/A", "user", "human", ""]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "answer", "rank", "response"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to everything inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_row_is_an_example_or_has_a_reason(name: str, data: st.DataObject) -> None:
    row = copy.deepcopy(data.draw(st.sampled_from(load(name))))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(row)))
        inside: Any = row
        try:
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = data.draw(anything)
        except (KeyError, IndexError, TypeError):
            continue  # An earlier change took this place away.
    value = {key: item for key, item in row.items() if item is not None}
    messages = []
    for known in PAIR_FORMATS:
        known.fits(value)
        try:
            results = convert(value, known.name, label="helpful")
        except RowError as error:
            messages.append(str(error))
            continue
        assert results
        for result in results:
            assert isinstance(result, PairRow | Dropped)
            if isinstance(result, PairRow):
                pair_findings(result)
                assert isinstance(json.loads(result.extra), dict)
    try:
        detect("f", [value], options={"label": "safe"} if name == "safe_rlhf" else {})
    except (DataError, ConfigurationError) as error:
        messages.append(str(error))
    assert not any(CANARY in message for message in messages)
