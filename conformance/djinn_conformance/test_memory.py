"""Laws of memory managers."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from djinn.errors import OutOfMemoryError
from djinn_conformance.assertions import expect, expect_equal, expect_same_tensor
from djinn_conformance.laws import law
from djinn_conformance.memory_pressure import device_bytes, expect_honest
from djinn_conformance.memory_sessions import (
    MAX_ROWS,
    ROW_BYTES,
    SOME_TIMES,
    MemorySessions,
    Steps,
    expect_refused,
    steps,
)
from djinn_conformance.subjects import Subject
from djinn_plugins.common.kinds.executor import SupportsOutOfMemoryRetry
from djinn_plugins.common.kinds.memory import MemoryFactory, MemoryOptions, SupportsEviction

_FEW_ROWS = 14
_limits = st.builds(
    lambda rows, host_rows: MemoryOptions(rows * ROW_BYTES, host_rows * ROW_BYTES),
    st.sampled_from([6, 9, _FEW_ROWS, 40, 0]), st.sampled_from([0, 0, 4]))


@law("memory.results_equal")
@given(drawn=steps(), options=_limits)
def test_results_equal(subject: Subject, plugin: MemoryFactory, drawn: Steps, options: MemoryOptions) -> None:
    """Let sessions compute under some limit, and compare every value with eager."""
    where = f"{subject}, {options}: {drawn}"
    with MemorySessions(plugin, options) as sessions:
        for failures in sessions.apply(drawn):
            expect_refused(failures, where)
        sessions.expect_eager(where, may_fail=True)


@law("memory.limit_kept", effort=0.5)
@given(drawn=steps(), options=_limits)
def test_limit_kept(subject: Subject, plugin: MemoryFactory, drawn: Steps, options: MemoryOptions) -> None:
    """Measure the storages on the device after every command."""
    assume(options.limit_bytes)
    with MemorySessions(plugin, options) as sessions:
        for _ in sessions.apply(drawn):
            used_bytes = device_bytes(sessions.services)
            expect(used_bytes <= options.limit_bytes, "bytes on the device", got=used_bytes,
                   wanted=f"at most {options.limit_bytes}", where=f"{subject}, {options}: {drawn}")


@law("memory.room_used", effort=0.5)
@given(drawn=steps())
def test_room_used(subject: Subject, plugin: MemoryFactory, drawn: Steps) -> None:
    """Let sessions compute under a limit that has room for all that they ever compute, and for intermediate results."""
    rows = 2 * SOME_TIMES * MAX_ROWS * (len(drawn) + 1)
    with MemorySessions(plugin, MemoryOptions(2 * rows * ROW_BYTES)) as sessions:
        for failures in sessions.apply(drawn):
            expect(not failures, "failures", got=failures, wanted="none", where=f"{subject}: {drawn}")
        sessions.expect_eager(f"{subject}: {drawn}")


@law("memory.refusal_changes_nothing", effort=0.5)
@given(drawn=steps())
def test_refusal_changes_nothing(subject: Subject, plugin: MemoryFactory, drawn: Steps) -> None:
    """Ask each session for more than fits at all, and look at everything else."""
    where = f"{subject}: {drawn}"
    with MemorySessions(plugin, MemoryOptions(_FEW_ROWS * ROW_BYTES)) as sessions:
        for session in range(len(sessions.services)):
            expect(not sessions.upload(session, 2), "failures", got="some", wanted="none", where=where)
        for failures in sessions.apply(drawn):
            expect_refused(failures, where)
        for session in range(len(sessions.services)):
            for failures in sessions.oversized(session, _FEW_ROWS):
                expect_equal([failure.kind for failure in failures], ["OutOfMemoryError"], "failures", where)
        sessions.expect_eager(where)


@law("memory.in_use_stays", effort=0.5)
@given(drawn=steps(), used=st.lists(st.integers(0, 15), min_size=1, max_size=3))
def test_in_use_stays(subject: Subject, plugin: MemoryFactory, drawn: Steps, used: list[int]) -> None:
    """Use some values, and let the executor run out of memory while they are in use."""
    with MemorySessions(plugin, MemoryOptions(_FEW_ROWS * ROW_BYTES)) as sessions:
        list(sessions.apply(drawn))
        memory, eager = sessions.services[0].memory, sessions.eager[0]
        if not eager:
            return
        handles = [sorted(eager)[index % len(eager)] for index in used]
        with memory.lock:
            try:
                memory.use(handles)
            except OutOfMemoryError:
                return
            executor = sessions.executor
            if isinstance(executor, SupportsOutOfMemoryRetry) and executor.relief is not None:
                executor.relief()
            for handle in handles:
                value = memory.values[handle]
                if isinstance(memory, SupportsEviction):
                    memory.evict(value.untyped_storage())
                reach = value.storage_offset() + value.numel()
                expect(value.untyped_storage().nbytes() >= reach * value.element_size(), f"bytes of value {handle}",
                       got=value.untyped_storage().nbytes(), wanted="all", where=f"{subject}: {drawn}, {used}")
                expect_same_tensor(torch.clone(value), eager[handle], f"value {handle}", f"{subject}: {drawn}, {used}")
            memory.release()


@law("memory.usage_honest", effort=0.5)
@given(drawn=steps(), options=_limits)
def test_usage_honest(subject: Subject, plugin: MemoryFactory, drawn: Steps, options: MemoryOptions) -> None:
    """Compare what the manager reports with the storages, after every command."""
    with MemorySessions(plugin, options) as sessions:
        for _ in sessions.apply(drawn):
            expect_honest(sessions.manager, sessions.services, f"{subject}, {options}: {drawn}")


@law("memory.all_returned", effort=0.5)
@given(drawn=steps(), options=_limits)
def test_all_returned(subject: Subject, plugin: MemoryFactory, drawn: Steps, options: MemoryOptions) -> None:
    """End the sessions one after the other."""
    where = f"{subject}, {options}: {drawn}"
    with MemorySessions(plugin, options) as sessions:
        list(sessions.apply(drawn))
        for session, service in enumerate(sessions.services):
            service.close()
            sessions.eager[session].clear()
            sessions.expect_eager(where, may_fail=True)
        report = sessions.manager.report()
        expect_equal((sum(report.device.values()), report.host_bytes), (0, 0), "reported bytes", where)
        sessions.services.clear()
