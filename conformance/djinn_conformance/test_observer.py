"""Laws of observers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from djinn.kinds import Observer
from djinn_conformance.assertions import expect_equal
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject

_COUNTERS = ("operations", "nodes_executed", "materializations", "flushes", "round_trips", "bytes_sent",
             "bytes_received", "programs_sent", "shape_cache_hits", "shape_cache_misses", "live_handles")
_STATS = st.dictionaries(st.sampled_from(_COUNTERS) | st.text(max_size=8), st.integers(0, 2**70), max_size=16)


@law("observer.does_not_raise")
@given(stats=_STATS)
def test_does_not_raise(subject: Subject, plugin: Observer, stats: dict[str, int]) -> None:
    """Pass counters of all kinds."""
    try:
        plugin.observe(dict(stats))
    except Exception as error:
        raise AssertionError(f"observe: got {type(error).__name__}: {error}, should be no exception "
                             f"[{subject}: {stats}]") from error


@law("observer.stats_unchanged")
@given(stats=_STATS)
def test_stats_unchanged(subject: Subject, plugin: Observer, stats: dict[str, int]) -> None:
    """Pass counters that can be written to, and counters that cannot."""
    shown = dict(stats)
    plugin.observe(shown)
    expect_equal(shown, stats, "counters afterwards", str(subject))
    frozen: Mapping[str, int] = MappingProxyType(shown)
    plugin.observe(frozen)
