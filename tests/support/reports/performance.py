"""Publishing what the benchmarks measured, and telling what got worse.

``python performance.py BENCHMARKS.json`` reads what ``pytest --benchmark-json`` has written, adds it to the published
results under the release of PyTorch that is running, writes the tables and pictures of docs/performance.md anew, and
fails where a figure is worse than the one published before, or misses its bar without being listed with a reason in
specs/performance.toml. A figure that got worse fails the next runs too, until a run with ``--accept``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
import torch
from support.reports import performance_chart

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "specs" / "performance.toml"
THREADS = 1
"""Threads that each side computes with: eager, client and server."""
Better = Literal["lower", "higher"]
_converter = cattrs.Converter(forbid_extra_keys=True)


class SpecError(ValueError):
    """specs/performance.toml and the benchmarks do not agree."""


@attrs.frozen
class Measure:
    """What is measured, and what is asked of it; see specs/performance.toml."""

    measure: str
    rival: str
    bar: float
    better: Better
    unit: str
    how: str
    margin: float | None = None

    def badness(self, ratio: float, than: float) -> float:
        """By which factor a figure is worse than another; below 1 if it is better."""
        worse, base = (ratio, than) if self.better == "lower" else (than, ratio)
        return worse / base if base else math.inf if worse else 1.0

    def beyond(self, ratio: float) -> float:
        """By which factor a figure is better than the bar; below 1 if it misses it."""
        badness = self.badness(ratio, self.bar)
        return 1 / badness if badness else math.inf

    def met(self, ratio: float) -> bool:
        """Whether a figure meets the bar."""
        return self.badness(ratio, self.bar) <= 1


@attrs.frozen
class Gate:
    """What counts as noise: by how much a figure may be worse than before."""

    margin: float


@attrs.frozen
class Spec:
    """The table of measures, and those that are known to miss their bars, with reasons."""

    gate: Gate
    measures: dict[str, Measure]
    misses: dict[str, str]

    def margin(self, identity: str) -> float:
        """By how much a measure's figure may be worse than before."""
        own = self.measures[identity].margin
        return self.gate.margin if own is None else own


@attrs.frozen
class Figure:
    """What a run measured; ``reference`` is what later runs are held against."""

    ratio: float
    reference: float
    details: dict[str, float]


@attrs.frozen
class Results:
    """A run: where, when, and its figures."""

    torch: str
    python: str
    device: str
    machine: str
    threads: int
    date: str
    figures: dict[str, Figure]

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"performance-torch-{self.torch}-{self.device}"


def load_spec(path: Path = SPEC) -> Spec:
    """Read the table.

    Raises:
        SpecError: A miss is listed of something that is not measured, or without a reason.
    """
    spec = _converter.structure(tomllib.loads(path.read_text(encoding="utf-8")), Spec)
    for identity, reason in spec.misses.items():
        if identity not in spec.measures:
            raise SpecError(f"{path.name} lists a miss of {identity!r}, which is no measure.")
        if not reason.strip():
            raise SpecError(f"{path.name} gives no reason for the miss of {identity!r}.")
    return spec


def identity(benchmark: str) -> str:
    """Name the measure of a benchmark: ``test_replay`` and ``test_replay[tcp]`` measure ``replay``."""
    return benchmark.partition("[")[0].removeprefix("test_")


def figures_of(report: Mapping[str, Any], spec: Spec) -> dict[str, tuple[float, dict[str, float]]]:
    """Take the figures out of what pytest-benchmark has written.

    Raises:
        SpecError: A benchmark publishes what the table does not describe, or describes otherwise.
    """
    found: dict[str, tuple[float, dict[str, float]]] = {}
    for benchmark in report["benchmarks"]:
        told, name = benchmark["extra_info"], identity(benchmark["name"])
        if "ratio" not in told:
            continue
        described = spec.measures.get(name)
        if described is None:
            raise SpecError(f"{benchmark['name']} publishes a figure; {SPEC.name} has no measure {name!r}.")
        for field in ("measure", "bar", "better"):
            if told[field] != getattr(described, field):
                raise SpecError(f"{benchmark['name']} says {field} = {told[field]!r}, {SPEC.name} says "
                                f"{getattr(described, field)!r}.")
        if name in found:
            raise SpecError(f"Two benchmarks publish {name!r}.")
        found[name] = (float(told["ratio"]), {key: float(value) for key, value in told.get("details", {}).items()})
    return found


def with_references(
    found: Mapping[str, tuple[float, dict[str, float]]], before: Mapping[str, Figure], spec: Spec, *, accept: bool
) -> dict[str, Figure]:
    """Say what later runs are held against: this run; where it got worse, still the one before."""
    figures = {}
    for name, (ratio, details) in found.items():
        reference = before[name].reference if name in before and not accept else ratio
        is_worse = spec.measures[name].badness(ratio, reference) > 1 + spec.margin(name)
        figures[name] = Figure(ratio, reference if is_worse else ratio, details)
    return figures


def faults(figures: Mapping[str, Figure], spec: Spec, *, whole: bool) -> list[str]:
    """Tell what is wrong with a run's figures."""
    told = [f"{name}: not measured" for name in spec.measures if whole and name not in figures]
    for name, figure in figures.items():
        measure, margin = spec.measures[name], spec.margin(name)
        shown = f"{name}: {figure.ratio:.4g} {measure.unit}"
        if measure.badness(figure.ratio, figure.reference) > 1 + margin:
            told.append(f"{shown} is worse than {figure.reference:.4g}, published before, by more than {margin:.0%}")
        if not measure.met(figure.ratio) and name not in spec.misses:
            told.append(f"{shown} misses its bar of {measure.bar:g}, and {SPEC.name} does not list it with a reason")
        if name in spec.misses and measure.badness(figure.ratio, measure.bar) < 1 / (1 + margin):
            told.append(f"{shown} meets its bar of {measure.bar:g}: take it off the misses in {SPEC.name}")
    return told


def machine() -> str:
    """Describe this machine by what matters, and by nothing that names it."""
    model = platform.processor() or platform.machine()
    about = Path("/proc/cpuinfo")
    if about.exists():
        named = re.search(r"(?m)^model name\s*:\s*(.+)$", about.read_text(encoding="utf-8"))
        model = named[1].strip() if named else model
    return f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.machine()}"


def save(results: Results, folder: Path) -> None:
    """Write a run's figures."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_converter.unstructure(results), indent=1, sort_keys=True)
    (folder / f"{results.name}.json").write_text(f"{text}\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read what `save` has written."""
    return _converter.structure(json.loads(path.read_text(encoding="utf-8")), Results)


_BEGIN, _END = "<!-- generated: begin -->", "<!-- generated: end -->"


def write_page(page: Path, runs: Iterable[Results], spec: Spec) -> None:
    """Write the generated part of the page anew, and its pictures; what people wrote around it stays."""
    ordered = sorted(runs, key=lambda run: ([int(part) for part in re.findall(r"\d+", run.torch)], run.device),
                     reverse=True)
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise SpecError(f"{page.name} has no part between {_BEGIN} and {_END}.")
    body = "\n".join(line for run in ordered for line in _section(run, spec, page.parent))
    page.write_text(f"{head}{_BEGIN}\n{body}{_END}{tail}", encoding="utf-8")


def _section(run: Results, spec: Spec, folder: Path) -> list[str]:
    known = {name: measure for name, measure in spec.measures.items() if name in run.figures}
    picture = f"results/{run.name}.svg"
    reached = [(measure.measure, measure.beyond(run.figures[name].ratio)) for name, measure in known.items()]
    (folder / picture).write_text(performance_chart.bars(reached), encoding="utf-8")
    lines = [
        f"## PyTorch {run.torch}, executor on `{run.device}`", "",
        (f"{run.date}, Python {run.python}, {run.machine}; {run.threads} thread for each side. "
         f"All figures: [{run.name}.json](results/{run.name}.json)."), "",
        f"![How far each measure is beyond its bar, or short of it]({picture})", "",
        "| measure | rival | bar | measured | met |", "|---|---|---:|---:|---|",
    ]
    for name, measure in known.items():
        ratio = run.figures[name].ratio
        sign = "≤" if measure.better == "lower" else "≥"
        lines.append(f"| {measure.measure} | {measure.rival} | {sign} {measure.bar:g} | "
                     f"{ratio:.3g} {measure.unit} | {'yes' if measure.met(ratio) else '**no**'} |")
    lines += ["", "How it was measured, and the parts of it:", ""]
    for name, measure in known.items():
        details = "; ".join(f"{key} {value:.4g}" for key, value in run.figures[name].details.items())
        lines.append(f"- `{name}`: {measure.how}.{f' {details}.' if details else ''}")
    missed = [name for name, measure in known.items() if not measure.met(run.figures[name].ratio)]
    if missed:
        lines += ["", "Bars that are missed:", ""]
        lines += [f"- `{name}`: {' '.join(spec.misses.get(name, 'not explained').split())}" for name in missed]
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish the figures of a run; return 1 if something is wrong with them."""
    parser = argparse.ArgumentParser(prog="performance.py", description="Publish what the benchmarks measured.")
    parser.add_argument("measured", type=Path, help="what pytest --benchmark-json has written")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of performance.md and results/")
    parser.add_argument("--spec", type=Path, default=SPEC, help="the table of measures")
    parser.add_argument("--device", default="cpu", help="kind of device of the executor in that run")
    parser.add_argument("--partial", action="store_true", help="some benchmarks only: judge them, publish nothing")
    parser.add_argument("--accept", action="store_true", help="from now on, hold runs against this one")
    given = parser.parse_args(arguments)
    spec, folder = load_spec(given.spec), given.docs / "results"
    found = figures_of(json.loads(given.measured.read_text(encoding="utf-8")), spec)
    made = Results(torch.__version__.partition("+")[0], platform.python_version(), given.device, machine(),
                   THREADS, datetime.datetime.now(datetime.UTC).date().isoformat(), {})
    earlier = folder / f"{made.name}.json"
    before = load(earlier).figures if earlier.exists() else {}
    figures = with_references(found, before, spec, accept=given.accept)
    if not given.partial:
        save(attrs.evolve(made, figures=figures), folder)
        write_page(given.docs / "performance.md", map(load, sorted(folder.glob("performance-*.json"))), spec)
    told = faults(figures, spec, whole=not given.partial)
    print("\n".join(told or [f"{len(figures)} figures, none worse than before, no bar missed without a reason"]))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
