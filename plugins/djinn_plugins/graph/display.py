"""How a notebook displays values without data: as text, and as HTML without scripts. Nothing here computes a value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from djinn.ir.spec import TensorSpec

if TYPE_CHECKING:
    from djinn_plugins.graph.annotated import AnnotatedGraph

MAX_ROWS = 12
"""Most modules listed in a graph's display; the page of the whole graph lists all."""
_STYLE = "border-collapse:collapse;margin:4px 0"
_HEAD = "text-align:left;font-weight:normal;opacity:.65;padding:1px 14px 1px 0;vertical-align:top"


def tensor_text(spec: TensorSpec, state: str) -> str:
    """Describe a lazy tensor in a line."""
    size = ", ".join(map(str, spec.size))
    return f"LazyTensor({str(spec.dtype).removeprefix('torch.')}[{size}], device='{spec.device}', {state})"


def tensor_html(spec: TensorSpec, state: str) -> str:
    """Describe a lazy tensor as a small table."""
    size = " × ".join(map(str, spec.size)) or "scalar"
    held = amount(math.prod(spec.size) * spec.dtype.itemsize, "B")
    return _table("LazyTensor", [("size", size), ("dtype", str(spec.dtype).removeprefix("torch.")),
                                 ("device", str(spec.device)), ("bytes", held), ("state", state)])


def graph_text(annotated: AnnotatedGraph) -> str:
    """Describe an annotated graph in a line."""
    found = ", ".join(f"{count} {name}" for name, count in annotated.profile.patterns.items())
    size = len(annotated.graph.nodes())
    return f"AnnotatedGraph({annotated.profile.workload}, {size} operations, {found or 'no patterns'})"


def graph_html(annotated: AnnotatedGraph) -> str:
    """Describe an annotated graph: a summary, and its modules."""
    profile = annotated.profile
    rows = [
        ("operations", f"{len(annotated.graph.nodes()):,}"),
        ("work", f"{amount(profile.flops, 'FLOP')}, {amount(profile.bytes_moved, 'B')} moved"),
        ("steps", ", ".join(_runs(_plain(step) for step in profile.steps))),
        ("patterns", _counts(profile.patterns)),
        ("phases", _counts(profile.phases)),
        ("values", ", ".join(f"{_plain(kind)} {amount(count, 'B')}"
                             for kind, count in profile.residency_bytes.items() if count)),
        ("source", annotated.graph.backend_type + (f" ({annotated.graph.fallback_reason})"
                                                   if annotated.graph.fallback_reason else "")),
    ]
    return _table(_plain(profile.workload), [row for row in rows if row[1]]) + _modules(annotated)


def amount(number: float, unit: str) -> str:
    """Format a number with three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} P{unit}"


def _modules(annotated: AnnotatedGraph) -> str:
    """List the outermost modules with their costs, folded."""
    counts: dict[str, list[int]] = {}
    for known in annotated.nodes.values():
        parts = (known.module_path or "").split(".")
        # Show each of the repeated layers.
        name = ".".join(parts[: 3 if len(parts) > 2 and parts[2].isdigit() else 2])
        row = counts.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += known.flops
    if set(counts) <= {""}:
        return ""
    shown = [(name or "(the model itself)", f"{count} operations, {amount(flops, 'FLOP')}")
             for name, (count, flops) in list(counts.items())[:MAX_ROWS]]
    more = f"<div>and {len(counts) - MAX_ROWS} more</div>" if len(counts) > MAX_ROWS else ""
    return f"<details><summary>modules</summary>{_table('', shown)}{more}</details>"


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f'<tr><th style="{_HEAD}">{escape(name)}</th><td style="text-align:left">{escape(value)}</td></tr>'
                    for name, value in rows)
    heading = f"<div><b>{escape(title)}</b></div>" if title else ""
    return f'{heading}<table style="{_STYLE}"><tbody>{lines}</tbody></table>'


def _runs(words: Iterable[str]) -> Iterable[str]:
    for word, run in groupby(words):
        length = len(list(run))
        yield word if length == 1 else f"{word} × {length}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_plain(name)} {count}" for name, count in counts.items() if count)


def _plain(word: str) -> str:
    return word.replace("_", " ")
