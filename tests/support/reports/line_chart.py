"""Lines as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import attrs

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 70, 150, 30, 45
"""Of the picture, and of its margins, in pixels."""
_COLORS = ("#06c", "#c43", "#2a7", "#a5c", "#e80", "#555")
Points = Sequence[tuple[float, float]]


@attrs.frozen
class Axis:
    """One axis.

    Attributes:
        label: What it shows.
        is_log: Whether it is logarithmic.
    """

    label: str
    is_log: bool = False

    def place(self, value: float, low: float, high: float) -> float:
        """Return where a value is between two others, from 0 to 1."""
        if self.is_log:
            value, low, high = (math.log10(each) for each in (value, low, high))
        return (value - low) / (high - low)

    def ticks(self, low: float, high: float) -> list[float]:
        """Return round values between two others."""
        if self.is_log:
            return [10.0 ** power for power in range(math.ceil(math.log10(low) - 1e-9),
                                                     math.floor(math.log10(high) + 1e-9) + 1)]
        step = 10.0 ** math.floor(math.log10((high - low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
        return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def lines(title: str, x_axis: Axis, y_axis: Axis, series: Mapping[str, Points]) -> str:
    """Draw lines, each with its name.

    Args:
        title: Stands above.
        x_axis: The horizontal axis, which shows what there is.
        y_axis: The vertical one, which begins at 0 if it is not logarithmic.
        series: The points of each line, by its name.
    """
    points = [point for line in series.values() for point in line]
    left, right = _range(x_axis, [x for x, _ in points])
    low, high = _range(y_axis, [y for _, y in points], 0.0)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (_LEFT + wide * x_axis.place(x, left, right), _HEIGHT - _BOTTOM - tall * y_axis.place(y, low, high))

    drawn = [
        (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
         'font-size="12">'),
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">{escape(title)}</text>',
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_axis.label)}</text>',
        (f'<text x="14" y="{_TOP + tall / 2}" text-anchor="middle" '
         f'transform="rotate(-90 14 {_TOP + tall / 2})">{escape(y_axis.label)}</text>'),
    ]
    for tick in y_axis.ticks(low, high):
        y = at(left, tick)[1]
        drawn += [f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + wide}" y2="{y:.1f}" stroke="#ddd"/>',
                  f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>']
    for tick in x_axis.ticks(left, right):
        x = at(tick, low)[0]
        drawn += [f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#ddd"/>',
                  f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:.6g}</text>']
    for number, (name, line) in enumerate(series.items()):
        color, y = _COLORS[number % len(_COLORS)], _TOP + 16 * number + 8
        path = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in line)
        drawn += [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>',
                  f'<text x="{_WIDTH - _RIGHT + 10}" y="{y}" fill="{color}">{escape(name)}</text>']
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _range(axis: Axis, values: Sequence[float], *others: float) -> tuple[float, float]:
    """Return the ends of an axis."""
    low, high = min(values), max(values)
    if axis.is_log:
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)
    low, high = min((low, *others)), max((high, *others))
    return low, high if high > low else low + 1.0
