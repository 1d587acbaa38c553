"""Laws of caches of results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.kinds import CacheFactory, SubmissionCache
from djinn.session import runtime
from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_equal, expect_same_tensor
from djinn_conformance.chains import Chain, apply_chain, chains, given_matrices
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject

_TIMES = 3
_MANY_BYTES = 2**20


@contextmanager
def _opened(subject: Subject, max_bytes: int) -> Iterator[Session]:
    """Start a session that keeps results, and hands nothing over before a value is fetched."""
    session = runtime.init(plugins=[f"cache={subject.registered.name}"], result_cache_bytes=max_bytes, flush_every=None)
    try:
        yield session
    finally:
        runtime.shutdown()


@law("cache.results_equal", effort=0.5)
@given(chain=chains(6), written=st.integers(0, 2), amount=st.sampled_from([0.5, -1.0, 2.0]))
def test_results_equal(subject: Subject, chain: Chain, written: int, amount: float) -> None:
    """Run a program several times on the same values, which it may write, and which are written in between."""
    with _opened(subject, _MANY_BYTES) as session:
        mine, theirs = [tensor.to(session.device) for tensor in given_matrices()], given_matrices()
        for time in range(2 * _TIMES):
            there, here = _pure(mine), _pure(theirs)
            expect_same_tensor(there.cpu(), here, f"what is kept, the {time + 1}. time", f"{subject}: {chain}")
            if time == _TIMES:
                mine[written].mul_(amount)
                theirs[written].mul_(amount)
            made, wanted = apply_chain(chain, mine), apply_chain(chain, theirs)
            for index in (-1, 0):
                expect_same_tensor(made[index].cpu(), wanted[index], f"value {index}, the {time + 1}. time",
                                   f"{subject}: {chain}")


def _pure(given: list[torch.Tensor]) -> torch.Tensor:
    """Compute something that is worth keeping, of all that is given."""
    return ((given[0] @ given[1]).tanh() @ given[2]).sum(0)


@law("cache.limit_kept", effort=0.3)
@given(chain=chains(6), max_bytes=st.sampled_from([64, 200, 1000]), count=st.integers(1, 8))
def test_limit_kept(subject: Subject, chain: Chain, max_bytes: int, count: int) -> None:
    """Run different segments on different values, so that many results could be kept."""
    with _opened(subject, max_bytes) as session:
        mine = [tensor.to(session.device) for tensor in given_matrices()]
        for number in range(count):
            (apply_chain(chain, mine)[-1] * number).cpu()
            kept = session.stats()["results_kept_bytes"]
            expect(kept <= max_bytes, "bytes that are kept", got=kept, wanted=f"at most {max_bytes}",
                   where=f"{subject}: {chain}")


@law("cache.values_freed", effort=0.3)
@given(chain=chains(6))
def test_values_freed(subject: Subject, chain: Chain) -> None:
    """Let a cache that keeps nothing take its place."""
    with _opened(subject, _MANY_BYTES) as session:
        mine = [tensor.to(session.device) for tensor in given_matrices()]
        session.synchronize()
        before = session.stats()["live_handles"]
        for _ in range(_TIMES):
            apply_chain(chain, mine)[-1].cpu()
        with session.lock:
            session.backend.use_cache(SubmissionCache)
        gc.collect()
        session.synchronize()
        session.synchronize()
        expect_equal(session.stats()["live_handles"], before, "values that the executor holds", f"{subject}: {chain}")


@law("cache.counts_named", effort=0.3)
@given(chain=chains(6))
def test_counts_named(subject: Subject, plugin: CacheFactory, chain: Chain) -> None:
    """Look at the counters of a new cache, and of one that was used."""
    with _opened(subject, _MANY_BYTES) as session:
        cache = plugin.open(_MANY_BYTES, session.classifier)
        counts = cache.stats()
        expect_equal(sorted(counts), sorted(SubmissionCache.counts), "names of counters", f"{subject}")
        mine = [tensor.to(session.device) for tensor in given_matrices()]
        for _ in range(_TIMES):
            apply_chain(chain, mine)[-1].cpu()
        used = {name: session.stats()[name] for name in counts}
        expect(all(count >= 0 for count in used.values()), "counters", got=used,
               wanted="whole numbers from 0", where=f"{subject}: {chain}")
        torch.ones(1, device=session.device).cpu()
