"""Pictures for the report as inline SVG: line charts of metrics and tracks of the gate's rules. No JavaScript.

Colours come from the report's style sheet through classes, so that light and dark mode need no second picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from tasks.showing import show_number

CHART_WIDTH, CHART_HEIGHT = 380, 210
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 52, 14, 14, 34
TRACK_WIDTH, TRACK_HEIGHT = 560, 64
NUM_COLOURS = 5
MAX_POINTS_WITH_DOTS = 60


@dataclass(frozen=True)
class Series:
    """One line of a chart: `points` are (step, value), finite, by ascending step."""

    name: str
    points: Sequence[tuple[float, float]]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers inside [low, high].

    >>> nice_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def line_chart(series: Sequence[Series], label: str, x_label: str = "optimizer step") -> Markup:
    """Draw up to five lines over steps; `label` is read out by screen readers."""
    shown = [line for line in series if line.points][:NUM_COLOURS]
    if not shown:
        return Markup("")
    x_low, x_high = _span([x for line in shown for x, _ in line.points], padding=0.0)
    y_low, y_high = _span([y for line in shown for _, y in line.points], padding=0.08)
    right, bottom = CHART_WIDTH - MARGIN_RIGHT, CHART_HEIGHT - MARGIN_BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = MARGIN_LEFT + (x - x_low) / (x_high - x_low) * (right - MARGIN_LEFT)
        return round(across, 1), round(bottom - (y - y_low) / (y_high - y_low) * (bottom - MARGIN_TOP), 1)

    parts = [_open_svg(CHART_WIDTH, CHART_HEIGHT, label, "chart")]
    for tick in nice_ticks(y_low, y_high):
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{MARGIN_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{MARGIN_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{_tick(tick)}</text>')
    for tick in (t for t in nice_ticks(x_low, x_high) if float(t).is_integer()):
        x, _ = place(tick, y_low)
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 14}" text-anchor="middle">{_tick(tick)}</text>')
    parts.append(f'<line class="axis" x1="{MARGIN_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (MARGIN_LEFT + right) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{CHART_HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
    )
    for index, line in enumerate(shown):
        parts.append(_polyline(line, [place(*point) for point in line.points], index))
    return Markup("".join(parts) + "</svg>")


def _polyline(line: Series, places: Sequence[tuple[float, float]], index: int) -> str:
    path = " ".join(f"{x},{y}" for x, y in places)
    drawn = f'<polyline class="line c{index}" points="{path}"/>'
    if len(places) > MAX_POINTS_WITH_DOTS:
        return drawn
    dots = [
        f'<circle class="dot c{index}" cx="{x}" cy="{y}" r="2.6">'
        f"<title>{escape(line.name)}, step {_tick(step)}: {show_number(value)}</title></circle>"
        for (x, y), (step, value) in zip(places, line.points, strict=True)
    ]
    return drawn + "".join(dots)


def rule_track(rule: Mapping[str, Any]) -> Markup:
    """Draw one rule of gate.json: allowed range, interval, estimate, lower bound and threshold on the rule's own axis.

    A rule without numbers (an ERROR) gives an empty picture.
    """
    value, threshold = rule.get("value"), rule.get("threshold")
    if value is None or threshold is None:
        return Markup("")
    upward = rule["kind"] in ("primary", "champion", "non_inferiority")
    relative = rule.get("scale") == "relative"
    interval = rule.get("interval") or [value, value]
    marks = [value, threshold, *interval, *_known(rule, "threshold_low", "bound_threshold")]
    low, high = _span(marks, padding=0.14)
    left, right, middle = 10, TRACK_WIDTH - 10, 25

    def place(x: float) -> float:
        return round(left + (x - low) / (high - low) * (right - left), 1)

    good_from = place(threshold) if upward else place(rule["threshold_low"]) if _known(rule, "threshold_low") else left
    good_to = right if upward else place(threshold)
    parts = [_open_svg(TRACK_WIDTH, TRACK_HEIGHT, f"{rule['name']}: {rule['detail']}", "track")]
    parts.append(f'<rect class="field" x="{left}" y="10" width="{right - left}" height="30" rx="4"/>')
    parts.append(f'<rect class="allowed" x="{good_from}" y="10" width="{max(0.0, good_to - good_from)}" height="30"/>')
    if low < 0 < high:
        parts.append(f'<line class="zero" x1="{place(0)}" x2="{place(0)}" y1="10" y2="40"/>')
    parts += [
        f'<line class="threshold" x1="{place(limit)}" x2="{place(limit)}" y1="6" y2="44"/>'
        for limit in [threshold, *_known(rule, "threshold_low")]
    ]
    state = escape(rule["verdict"])
    start, end = place(interval[0]), place(interval[1])
    parts.append(f'<line class="interval v-{state}" x1="{start}" x2="{end}" y1="{middle}" y2="{middle}"/>')
    if rule.get("bound") is not None:
        bound = place(rule["bound"])
        parts.append(f'<line class="bound v-{state}" x1="{bound}" x2="{bound}" y1="16" y2="34"/>')
    parts.append(f'<circle class="estimate v-{state}" cx="{place(value)}" cy="{middle}" r="6"/>')
    for tick in nice_ticks(low, high, 6):
        shown = f"{_tick(100 * tick)} %" if relative else _tick(tick)
        parts.append(f'<text class="tick" x="{place(tick)}" y="58" text-anchor="middle">{shown}</text>')
    return Markup("".join(parts) + "</svg>")


def _known(rule: Mapping[str, Any], *names: str) -> list[float]:
    return [rule[name] for name in names if rule.get(name) is not None]


def _span(values: Sequence[float], padding: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        half = abs(high) * 0.5 or 0.5
        return low - half, high + half
    return low - padding * (high - low), high + padding * (high - low)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.4g}"


def _open_svg(width: int, height: int, label: str, name: str) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )
