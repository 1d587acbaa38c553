"""Laws of exporters."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import given

from djinn_conformance.annotations import annotated_graphs, bare
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.graphs import EMPTY, deep_graph, expect_unchanged, show, snapshot
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.kinds import Exporter

_LIMIT_S = 20.0


def _written(plugin: Exporter, annotated: AnnotatedGraph, before: bytes | None = None) -> tuple[bytes, list[str]]:
    """Export into a new folder, over a file if ``before`` is given; return the file, and the other files there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"graph{plugin.suffix}"
        if before is not None:
            path.write_bytes(before)
        plugin.export(annotated, path)
        others = sorted(found.name for found in Path(folder).iterdir() if found != path)
        return path.read_bytes() if path.is_file() else b"", others


@law("exporter.well_formed")
def test_well_formed(subject: Subject, plugin: Exporter) -> None:
    """Check the suffix."""
    suffix = plugin.suffix
    is_one = suffix.startswith(".") and len(suffix) > 1 and suffix == Path(suffix).name and suffix.isprintable()
    expect(is_one and " " not in suffix, "suffix", got=suffix, wanted="a dot and the end of a file's name",
           where=str(subject))


@law("exporter.one_file", effort=0.4)
@given(annotated=annotated_graphs())
def test_one_file(subject: Subject, plugin: Exporter, annotated: AnnotatedGraph) -> None:
    """Export into an empty folder."""
    file, others = _written(plugin, annotated)
    where = f"{subject}: {show(annotated.graph)}"  # type: ignore[arg-type]  # drawn ones are recorded graphs
    expect(len(file) > 0, "file", got=len(file), wanted="more than 0 bytes", where=where)
    expect_equal(others, [], "what lies beside it", where)


@law("exporter.deterministic", effort=0.4)
@given(annotated=annotated_graphs())
def test_deterministic(subject: Subject, plugin: Exporter, annotated: AnnotatedGraph) -> None:
    """Export a graph and an equal one, with another graph in between."""
    first, _ = _written(plugin, annotated)
    _written(plugin, bare(EMPTY))
    second, _ = _written(plugin, copy.deepcopy(annotated))
    expect_equal(second == first, True, "whether a second file is equal", str(subject))


@law("exporter.replaces", effort=0.2)
@given(annotated=annotated_graphs())
def test_replaces(subject: Subject, plugin: Exporter, annotated: AnnotatedGraph) -> None:
    """Export over a longer file."""
    wanted, _ = _written(plugin, annotated)
    got, _ = _written(plugin, annotated, b"something else\n" * len(wanted))
    expect_equal(got == wanted, True, "whether the file is what it is in an empty folder", str(subject))


@law("exporter.graph_unchanged", effort=0.4)
@given(annotated=annotated_graphs())
def test_graph_unchanged(subject: Subject, plugin: Exporter, annotated: AnnotatedGraph) -> None:
    """Compare graph and annotations with copies made before."""
    graph: Any = annotated.graph
    before, where = snapshot(graph), str(subject)
    meaning = copy.deepcopy((dict(annotated.nodes), dict(annotated.values), annotated.patterns, annotated.profile))
    _written(plugin, annotated)
    expect_unchanged(graph, before, where)
    after = (dict(annotated.nodes), dict(annotated.values), annotated.patterns, annotated.profile)
    expect_equal(repr(after), repr(meaning), "annotations afterwards", where)


@law("exporter.any_graph")
@given(annotated=annotated_graphs())
def test_any_graph(subject: Subject, plugin: Exporter, annotated: AnnotatedGraph) -> None:
    """Export graphs with odd texts and numbers."""
    try:
        _written(plugin, annotated)
    except Exception as error:
        raise AssertionError(f"export: got {type(error).__name__}: {error}, should be no exception [{subject}: "
                             f"{annotated.nodes}]") from error


@law("exporter.deep_graph")
def test_deep_graph(subject: Subject, plugin: Exporter) -> None:
    """Export nothing, then a long chain."""
    _written(plugin, bare(EMPTY))
    annotated = bare(deep_graph())
    annotated.graph.edges()
    # Processor time of this thread: other load on the machine must not count.
    started = time.thread_time()
    _written(plugin, annotated)
    took_s = time.thread_time() - started
    expect(took_s < _LIMIT_S, "time", got=f"{took_s:.1f} s", wanted=f"less than {_LIMIT_S} s",
           where=f"{subject}: a chain of {len(annotated.nodes)} nodes")
