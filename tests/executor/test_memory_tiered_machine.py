"""Whatever several sessions do within a limit of memory, nobody notices it."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.memory.room import (
    DEFINE,
    ROW_BYTES,
    SIDE,
    Room,
    rows,
)

from djinn.wire.messages import Batch, Copy, Free, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.executor.memory.device_memory import COLD_S, DECODE_S
from djinn_plugins.executor.memory.storages import State
from djinn_plugins.executor.memory.tiers import HYSTERESIS, PressureLevel
from djinn_plugins.executor.service import SessionService


class Pressure(RuleBasedStateMachine):
    """Sessions under a tiny limit, and the same without one."""

    def __init__(self) -> None:
        super().__init__()
        self.reference: list[SessionService] = []
        self.sizes: list[dict[int, int]] = []
        self.next = 1
        self.tier = PressureLevel.NORMAL

    @initialize(limit=st.integers(18, 30), has_host=st.booleans(), keeps=st.booleans(), part=st.floats(0.3, 0.9))
    def begin(self, limit: int, has_host: bool, keeps: bool, part: float) -> None:
        # Where nothing can be moved, there has to be room for whatever cannot be made again.
        self.room = Room(limit * ROW_BYTES if has_host else 2**20, 3, keep_bytes=2**20 if keeps else 0,
                         host_bytes=0 if has_host else 1, warning=part, critical=part + 0.09)
        self.lines = (0.0, part, part + 0.09)
        self.reference = [SessionService(self.room.executor) for _ in self.room.services]
        for service in self.reference:
            service.handle(Batch(list(DEFINE)), [])
        self.sizes = [{} for _ in self.room.services]
        for session in range(3):
            self.do(session, self.uploaded(session, 3), rows(3, session))

    def uploaded(self, session: int, count: int) -> Upload:
        self.sizes[session][self.next] = count
        return Upload(self.fresh(), header_of(rows(count)))

    def fresh(self) -> int:
        self.next += 1
        return self.next - 1

    def do(self, session: int, command: Any, *tensors: torch.Tensor) -> None:
        ours, _ = self.room.do(session, command, tensors=[tensor.clone() for tensor in tensors])
        theirs, _ = self.reference[session].handle(
            Batch([command], synchronize=True), [tensor.clone() for tensor in tensors])
        assert [failure.kind for failure in ours.failures] == [failure.kind for failure in theirs.failures], ours

    def drawn(self, data: Any, most: int = 4) -> tuple[int, int]:
        session = data.draw(st.integers(0, 2))
        fitting = sorted(handle for handle, count in self.sizes[session].items() if count <= most)
        return session, data.draw(st.sampled_from(fitting)) if fitting else 0

    @rule(data=st.data(), count=st.integers(1, 4))
    def upload(self, data: Any, count: int) -> None:
        session = data.draw(st.integers(0, 2))
        self.do(session, self.uploaded(session, count), rows(count, self.next))

    @rule(data=st.data())
    def plus(self, data: Any) -> None:
        session, handle = self.drawn(data)
        if handle:
            self.sizes[session][self.next] = self.sizes[session][handle]
            self.do(session, Run(1, (handle, handle), [], (self.fresh(),)))

    @rule(data=st.data(), through_a_view=st.booleans())
    def write(self, data: Any, through_a_view: bool) -> None:
        session, handle = self.drawn(data)
        if handle:
            self.do(session, Run(5, (handle,), [0, 0, 1, 0.5], ()) if through_a_view else Run(2, (handle,), [0.5], ()))

    @rule(data=st.data())
    def view(self, data: Any) -> None:
        session, handle = self.drawn(data)
        if handle:
            self.sizes[session][self.next] = 1
            self.do(session, Run(3, (handle,), [0, 0, 1], (self.fresh(),)))

    @rule(data=st.data())
    def several(self, data: Any) -> None:
        session, handle = self.drawn(data, 3)
        if handle:
            outputs = (self.fresh(), self.fresh(), self.fresh())
            self.sizes[session] |= dict(zip(outputs, (*[self.sizes[session][handle]] * 2, 1), strict=True))
            self.do(session, Run(7, (handle,), [0, 0, 1], outputs))

    @rule(data=st.data())
    def grow(self, data: Any) -> None:
        session, handle = self.drawn(data, 3)
        if handle:
            self.sizes[session][self.next] = 2 * self.sizes[session][handle]
            self.do(session, Run(4, (handle, handle), [], (self.fresh(),)))

    @rule(data=st.data())
    def attend(self, data: Any) -> None:
        session, handle = self.drawn(data, 2)
        if handle:
            outputs = (self.fresh(), self.fresh())
            count = self.sizes[session][handle]
            self.sizes[session] |= dict(zip(outputs, (2 * count, count), strict=True))
            self.do(session, Run(8, (handle, handle), [], outputs))

    @rule(data=st.data())
    def copy(self, data: Any) -> None:
        session, handle = self.drawn(data)
        if handle:
            self.sizes[session][self.next] = self.sizes[session][handle]
            self.do(session, Copy(((handle, self.fresh(), 0),)))

    @rule(data=st.data())
    def resize(self, data: Any) -> None:
        session, handle = self.drawn(data, 3)
        if handle:
            self.sizes[session].pop(handle)
            self.do(session, Run(6, (handle,), [[3 * SIDE], 2.0], ()))
            self.do(session, Free((handle,)))

    @rule(data=st.data())
    def free(self, data: Any) -> None:
        session, handle = self.drawn(data, 99)
        if handle:
            self.sizes[session].pop(handle)
            self.do(session, Free((handle,)))

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        session, handle = self.drawn(data, 99)
        if handle:
            self.room.device.evict(self.room.place(session, handle))

    @rule(seconds=st.sampled_from((0.5 * COLD_S, 2 * COLD_S, 2 * DECODE_S)))
    def wait(self, seconds: float) -> None:
        self.room.clock.now_s += seconds

    @rule(data=st.data())
    def read(self, data: Any) -> None:
        session, handle = self.drawn(data, 99)
        if handle:
            self.compare(session, handle)

    def compare(self, session: int, handle: int) -> None:
        wanted = self.reference[session].handle(Batch(fetch=(handle,)), [])[1][0]
        got = self.room.value(session, handle)
        assert got.stride() == wanted.stride()
        assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), f"value {handle} of session {session}"

    @precondition(lambda self: self.reference)
    @invariant()
    def books_are_right(self) -> None:
        self.room.expect_exact("in the end")
        accounts, limit = self.room.device.accounts, self.room.device.limit_bytes
        assert accounts.held_bytes <= limit
        moved = {place for session in range(3) for place in self.room.memory(session).places.entries
                 if place.state is State.MOVED}
        assert accounts.host_bytes == sum(place.size_bytes for place in moved)
        part, tier = accounts.held_bytes / limit, self.room.device.tier
        if tier is not PressureLevel.NORMAL and self.tier >= tier:
            assert part >= self.lines[tier] - HYSTERESIS or self.tier is tier
        self.tier = tier

    def teardown(self) -> None:
        for session, sizes in enumerate(self.sizes):
            for handle in sizes:
                self.compare(session, handle)


class TestPressure(Pressure.TestCase):  # type: ignore[name-defined,misc]  # Hypothesis makes the class when asked
    settings = settings(max_examples=200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 25,
                        stateful_step_count=40, deadline=None, derandomize=True)
