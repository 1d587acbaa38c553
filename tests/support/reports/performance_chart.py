"""Bars as SVG: how far each measure is beyond its bar, or short of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

_ROW, _LABELS, _WIDTH, _SPAN = 22, 520, 860, 8.0
"""Height of a row and width of the labels and of all in pixels; factors beyond the span are cut off at the edge."""


def bars(reached: Sequence[tuple[str, float]]) -> str:
    """Draw one bar for each measure, on a logarithmic axis whose middle is the bar that it has to reach.

    Args:
        reached: Name, and by which factor the measure is better than asked; below 1, it misses its bar.
    """
    height = _ROW * (len(reached) + 1) + 10
    middle, half = (_LABELS + _WIDTH) / 2, (_WIDTH - _LABELS) / 2 - 30
    lines = [
        (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
         'font-size="12">'),
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{middle}" y="15" text-anchor="middle">short of the bar | beyond it</text>',
    ]
    for row, (name, factor) in enumerate(reached, start=1):
        top = row * _ROW + 4
        share = max(-1.0, min(1.0, math.log(factor) / math.log(_SPAN))) if factor > 0 else -1.0
        length = abs(share) * half
        left = middle if share >= 0 else middle - length
        edge = left + length + 4 if share >= 0 else left - 4
        lines += [
            f'<text x="{_LABELS - 10}" y="{top + 11}" text-anchor="end">{escape(_short(name))}</text>',
            (f'<rect x="{left:.1f}" y="{top}" width="{max(length, 1):.1f}" height="{_ROW - 8}" '
             f'fill="{"#2a7" if factor >= 1 else "#c43"}"/>'),
            (f'<text x="{edge:.1f}" y="{top + 11}" text-anchor="{"start" if share >= 0 else "end"}" '
             f'font-size="10">{factor:.2g}x</text>'),
        ]
    lines.append(f'<line x1="{middle}" y1="20" x2="{middle}" y2="{height - 6}" stroke="black"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _short(name: str, limit: int = 80) -> str:
    return name if len(name) <= limit else f"{name[:limit - 1]}…"
