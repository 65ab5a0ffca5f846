"""How values, numbers and a gate's rules are shown, in the same way everywhere."""

from __future__ import annotations

from tasks.showing import flatten, gate_rules, show_duration, show_number


def test_nested_values_become_leaves() -> None:
    nested = {"a": {"b": {"c": {"d": {"e": 1}}}}, "d": [1, {"x": 2}], "e": {}, "f": []}
    assert flatten(nested) == {"a.b.c.d.e": 1, "d": [1, {"x": 2}], "e": {}, "f": []}
    assert flatten(nested, "p", lists=True) == {"p.a.b.c.d.e": 1, "p.d.0": 1, "p.d.1.x": 2, "p.e": {}, "p.f": []}
    assert flatten({}) == {}
    assert flatten({}, "data") == {"data": {}}
    assert flatten(3, "seed") == {"seed": 3}


def test_numbers_for_people() -> None:
    values = (None, 0.0, 3.0, 12345.0, 0.123456, 1e-9, float("nan"), True, "x")
    assert [show_number(value) for value in values] == [
        "-", "0", "3", "12,345", "0.1235", "1.00e-09", "-", "-", "-",
    ]  # fmt: skip
    assert show_number(None, missing="–") == "–"
    assert show_duration(59.96) == "60.0 s"
    assert show_duration(7322) == "2 h 2 min"
    assert show_duration(None, missing="–") == "–"


def test_the_rules_of_a_gate_with_their_roles() -> None:
    primary, guard = {"name": "primary"}, {"name": "length.maximum"}
    assert gate_rules({"primary": primary, "champion": None, "guards": [guard, None, "damaged"]}) == [
        ("primary", primary),
        ("guard", guard),
    ]
    assert gate_rules({"champion": primary, "guards": None}) == [("champion", primary)]
