"""Laws of outputs of metrics."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinn.ir.phase import ExecutionPhase
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.common.operators.stored_models import StoredFile, StoredModel
from djinn_plugins.server.kinds.metrics import (
    BUCKETS_S,
    MAX_PROGRAM_NAME,
    Amounts,
    Counts,
    EndedBy,
    MetricsOutput,
    Outcome,
    ProgramTime,
    TenantTotals,
)
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenant_limits import Limited

Open = Callable[..., Any]
_COUNTS = st.integers(0, 2**62)
_LABELS = st.just("") | st.just("(other)") | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)
_BUCKETS = st.tuples(*[_COUNTS] * (len(BUCKETS_S) + 1))


def _by(names: Any) -> st.SearchStrategy[dict[Any, int]]:
    return st.dictionaries(st.sampled_from(get_args(names)), _COUNTS)


_STATS = st.builds(
    Counts, requests=_by(Outcome), durations=_BUCKETS, duration_ns=_COUNTS, rejections=_by(Limited), waits=_BUCKETS,
    wait_ns=_COUNTS, device_ns=_COUNTS, received_bytes=_COUNTS, sent_bytes=_COUNTS, ended=_by(EndedBy))
_PROGRAMS = st.lists(st.builds(
    ProgramTime, st.text(max_size=MAX_PROGRAM_NAME), st.sampled_from(ExecutionPhase), _COUNTS, _COUNTS, _COUNTS),
    max_size=2).map(tuple)
_TOTALS = st.dictionaries(_LABELS, st.builds(
    TenantTotals, _STATS, st.builds(Amounts, sessions=_COUNTS, handles=_COUNTS, held_bytes=_COUNTS), _COUNTS,
    st.integers(0, 100), st.dictionaries(st.sampled_from(["SIGKILL", "exit", "start"]), _COUNTS), _PROGRAMS),
    max_size=3)


@attrs.define
class FakeStatistics:
    """The statistics of a server that does not exist."""

    labels: dict[str, TenantTotals] = attrs.field(factory=dict)
    own: Counts = attrs.field(factory=Counts)
    version: str = "0.0.0"
    address: str = "tcp://127.0.0.1:7777"

    def tenant_of(self, token: str) -> str:
        """Return that all clients are one tenant."""
        return ""

    def operate(self, command: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Return no sessions."""
        return []

    def pages(self) -> list[str]:
        """Return the URL of metrics."""
        return ["http://127.0.0.1:9090"]

    def models(self) -> list[StoredModel]:
        """Return one model."""
        return [StoredModel("gpt2", files=(StoredFile("model.safetensors", 1, 64 * "0"),))]

    def totals(self) -> dict[str, TenantTotals]:
        """Return the statistics by label."""
        return self.labels

    def gateway(self) -> Counts:
        """Return the counters of connections whose tenant is not known."""
        return self.own

    def why_not_ready(self) -> str:
        """Return that sessions can begin."""
        return ""


@pytest.fixture(scope="module")
def sample(plugin: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], ServeOptions]:
    """Returns options that ask for the output, different ones each time."""
    return lambda: plugin.sample(tmp_path_factory.mktemp("metrics"))


@pytest.fixture(scope="module")
def opened(subject: Subject, plugin: Any, sample: Callable[[], ServeOptions]) -> Open:
    """Opens an output of some source."""
    @contextmanager
    def running(source: FakeStatistics, options: ServeOptions | None = None) -> Iterator[MetricsOutput]:
        output = plugin.open(sample() if options is None else options, source)
        expect(output is not None, "the output for its own options", got=output, wanted="an output", where=str(subject))
        output.start()
        try:
            yield output
        finally:
            output.stop()

    return running


@pytest.fixture(scope="module")
def exported(opened: Open) -> Iterator[Callable[[FakeStatistics], None]]:
    """Exports any source, through one output that stays open."""
    source = FakeStatistics()
    with opened(source) as output:
        def export(other: FakeStatistics) -> None:
            source.labels, source.own = other.labels, other.own
            output.export()

        yield export


@law("metrics.takes_all_totals", effort=0.3)
@given(labels=_TOTALS, own=_STATS)
def test_takes_all_totals(subject: Subject, exported: Callable[[FakeStatistics], None], labels: dict[str, TenantTotals],
                          own: Counts) -> None:
    """Export statistics of all kinds."""
    try:
        exported(FakeStatistics(labels, own))
    except Exception as error:
        raise AssertionError(f"export: got {type(error).__name__}: {error}, should be no exception [{subject}: "
                             f"{labels}]") from error


@law("metrics.source_unchanged", effort=0.3)
@given(labels=_TOTALS, own=_STATS)
def test_source_unchanged(subject: Subject, exported: Callable[[FakeStatistics], None], labels: dict[str, TenantTotals],
                          own: Counts) -> None:
    """Compare the statistics before and after."""
    source = FakeStatistics(labels, own)
    before = copy.deepcopy((labels, own))
    exported(source)
    expect_equal((source.labels, source.own), before, "statistics afterwards", str(subject))


@law("metrics.stop_is_final")
def test_stop_is_final(subject: Subject, opened: Open) -> None:
    """Look for threads."""
    before = set(threading.enumerate())
    with opened(FakeStatistics()) as output:
        output.export()
    left = {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()}
    expect_equal(left, set(), "threads that are left", str(subject))


@law("metrics.restarts_independently")
def test_restarts_independently(subject: Subject, opened: Open, sample: Callable[[], ServeOptions]) -> None:
    """Open it twice, one after the other."""
    options = sample()
    for time in ("first", "second"):
        try:
            with opened(FakeStatistics({"ann": TenantTotals()}), options) as output:
                output.export()
        except Exception as error:
            raise AssertionError(f"the {time} output: got {type(error).__name__}: {error}, should be no exception "
                                 f"[{subject}]") from error
