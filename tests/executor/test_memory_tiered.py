"""Values within a limit of memory: books, tiers, what goes first, and that nobody notices."""

from __future__ import annotations

import sys

import pytest
import torch
from support.memory.room import (
    ATTEND,
    GROW,
    PLUS,
    RESIZE,
    ROW_BYTES,
    ROWS,
    SIDE,
    THROUGH_A_VIEW,
    TWO,
    WRITE,
    N,
    Room,
    T,
    open_executor,
    rows,
    template,
)
from support.processes.warm import run_python

from djinn.ir.program import Program, Step
from djinn.wire.messages import Define, Free, Poisoned, Run
from djinn_plugins.common.kinds.executor import SupportsEffectReport
from djinn_plugins.executor.memory.device_memory import COLD_S, DECODE_S
from djinn_plugins.executor.memory.eviction import EvictionCandidate, in_order
from djinn_plugins.executor.memory.roles import Gone, Role
from djinn_plugins.executor.memory.storages import ManagedStorage, State
from djinn_plugins.executor.memory.tiers import PressureLevel, Tiers

# Tiers.


def test_tiers_are_entered_at_their_lines_and_left_below_them() -> None:
    tiers = Tiers()
    seen = [tiers.follow(held, 100) for held in (0, 79, 80, 76, 75, 74, 80, 94, 95, 91, 90, 89, 76, 74, 100, 10)]
    assert [int(tier) for tier in seen] == [0, 0, 1, 1, 1, 0, 1, 1, 2, 2, 2, 1, 1, 0, 2, 0]


@pytest.mark.parametrize(("warning", "critical"), [(0.9, 0.9), (0.04, 0.9), (0.5, 1.1), (0.9, 0.8)])
def test_tiers_that_make_no_sense_are_refused(warning: float, critical: float) -> None:
    with pytest.raises(ValueError, match="no tiers"):
        Tiers(warning, critical)


# What a program does.


@pytest.mark.parametrize(("program", "written", "grown", "attended"), [
    (PLUS, set(), {}, set()), (WRITE, {0}, {}, set()), (ROWS, set(), {}, set()), (GROW, set(), {0: 0}, set()),
    (THROUGH_A_VIEW, {0}, {}, set()), (RESIZE, {0}, {}, set()), (TWO, set(), {}, set()), (ATTEND, set(), {0: 0}, {0}),
])
def test_what_a_program_does_is_found_out(
    program: Program, written: set[int], grown: dict[int, int], attended: set[int]
) -> None:
    compiled = open_executor().compile(program)
    assert isinstance(compiled, SupportsEffectReport)
    effects = compiled.effects
    assert (effects.written, effects.grown, effects.attended) == (written, grown, attended)
    assert effects.changes_storages == (program is RESIZE)
    assert effects.patched == ({0} if program is THROUGH_A_VIEW else set())


# What goes first.


def candidate(role: Role, used_at: float, *, is_active: bool = False, source: bool = False) -> EvictionCandidate:
    place = ManagedStorage(torch.UntypedStorage(10), 10, role, used_at)
    place.host = torch.zeros(10, dtype=torch.uint8) if source else None
    return EvictionCandidate(place, 1, is_active)


def test_what_goes_first_goes_by_meaning_and_then_by_age() -> None:
    weight, old = candidate(Role.WEIGHT, 5, source=True), candidate(Role.UNKNOWN, 1)
    new, cold_cache = candidate(Role.UNKNOWN, 9), candidate(Role.KV_CACHE, 3)
    active = candidate(Role.KV_CACHE, 0, is_active=True)
    state, gradient = candidate(Role.OPTIMIZER_STATE, 8), candidate(Role.GRADIENT, 0)
    order = [weight, state, old, cold_cache, new, gradient, active]
    assert in_order([active, new, gradient, cold_cache, old, state, weight], 1000) == order


def test_caches_beyond_their_share_go_before_weights_and_less_so_while_somebody_decodes() -> None:
    weight, cache = candidate(Role.WEIGHT, 1, source=True), candidate(Role.KV_CACHE, 5)
    assert in_order([weight, cache], 49) == [cache, weight]
    assert in_order([weight, cache], 51) == [weight, cache]
    decoding = candidate(Role.KV_CACHE, 5, is_active=True)
    assert in_order([weight, cache, decoding], 34) == [weight, cache, decoding]
    assert in_order([weight, cache, decoding], 33) == [cache, weight, decoding]


def test_roles_are_found_out_from_what_is_done() -> None:
    room = Room(2**20)
    room.upload(0, 1, rows(4))
    room.upload(0, 2, rows(1, 1))
    room.do(0, Run(1, (1, 1), [], (3,)), Run(8, (3, 2), [], (4, 5)), Run(2, (1,), [2.0], ()), Run(4, (2, 2), [], (6,)),
            Run(4, (6, 2), [], (7,)))
    roles = {handle: room.place(0, handle).role for handle in (1, 2, 3, 4, 6, 7)}
    assert roles == {1: Role.WEIGHT, 2: Role.WEIGHT, 3: Role.ACTIVATION, 4: Role.KV_CACHE, 6: Role.ACTIVATION,
                     7: Role.KV_CACHE}
    assert room.device.accounts.device[Role.KV_CACHE] == (5 + 3) * ROW_BYTES


# Going and coming back.


def test_a_result_is_dropped_and_computed_again_with_all_that_lies_in_it() -> None:
    room = Room(2**20)
    room.upload(0, 1, rows(4))
    room.do(0, Run(7, (1,), [0, 1, 3], (2, 3, 4)))
    first = room.place(0, 2)
    assert room.place(0, 4) is first
    assert room.device.evict(first)
    assert room.device.evict(room.place(0, 3))
    assert (first.state, first.storage.nbytes(), room.device.accounts.host_bytes) == (State.DROPPED, 0, 0)
    assert room.device.evict(room.place(0, 1))
    assert torch.equal(room.value(0, 4), -rows(4)[1:3])
    assert room.place(0, 3).state is State.HERE, "one run brings back all that it makes"
    room.do(0, Run(2, (4,), [2.0], ()))
    assert torch.equal(room.value(0, 2)[1:3], -2 * rows(4)[1:3])
    assert room.device.accounts.evicted[Gone.ACTIVATION] == 2


@pytest.mark.parametrize("write", [Run(2, (1,), [3.0], ()), Run(5, (1,), [0, 0, 2, 3.0], ())], ids=["whole", "view"])
def test_what_a_dropped_result_was_computed_from_is_written_only_once_the_result_is_back(write: Run) -> None:
    room = Room(2**20)
    room.upload(0, 1, rows(4))
    room.do(0, Run(1, (1, 1), [], (2,)))
    assert room.device.evict(room.place(0, 2))
    room.do(0, write)
    assert torch.equal(room.value(0, 2), 2 * rows(4))
    # From now on it could not be computed again.
    assert room.device.evict(room.place(0, 2))
    assert room.place(0, 2).state is State.MOVED
    assert torch.equal(room.value(0, 2), 2 * rows(4))


def test_what_a_dropped_result_was_computed_from_stays_when_its_name_is_gone() -> None:
    room = Room(2**20)
    room.upload(0, 1, rows(4))
    room.do(0, Run(1, (1, 1), [], (2,)))
    assert room.device.evict(room.place(0, 2))
    room.do(0, Free((1,)))
    assert room.device.accounts.device_bytes == 4 * ROW_BYTES
    assert torch.equal(room.value(0, 2), 2 * rows(4))
    assert room.device.accounts.device_bytes == 4 * ROW_BYTES, "what it was computed from is let go"


def test_a_run_that_has_failed_in_part_is_never_run_again() -> None:
    room = Room(2**20)
    room.upload(0, 1, rows(4))
    both = Program((template("aten::neg", T), template("aten::select.int", T, N, N)),
                   (Step(0, (-1,), 1), Step(1, (-1,), 1)), 1, (0, 1))
    result, _ = room.do(0, Define(50, both), Run(50, (1,), [7, 0], (2, 3)))
    assert len(result.failures) == 1
    assert room.device.evict(room.place(0, 2))
    assert room.place(0, 2).state is State.MOVED
    assert torch.equal(room.value(0, 2), -rows(4))


def test_a_weight_is_reloaded_from_what_is_kept_until_it_is_written() -> None:
    room = Room(2**21, keep_bytes=2**21)
    weight = rows(600)
    room.upload(0, 1, weight)
    place = room.place(0, 1)
    assert room.device.evict(place)
    assert (place.state, room.device.accounts.host_bytes) == (State.RELOADABLE, 0)
    room.do(0, Run(2, (1,), [2.0], ()))
    assert room.device.evict(place)
    assert (place.state, room.device.accounts.host_bytes) == (State.MOVED, 600 * ROW_BYTES)
    assert torch.equal(room.value(0, 1), 2 * weight)
    assert room.device.accounts.host_bytes == 0


def test_a_view_of_a_weight_outlives_what_was_kept_of_it() -> None:
    room = Room(2**21, keep_bytes=2**21)
    room.upload(0, 1, rows(600))
    room.do(0, Run(3, (1,), [0, 5, 7], (2,)))
    assert room.device.evict(room.place(0, 2))
    room.do(0, Free((1,)))
    assert room.store.drop_spare() > 0
    assert room.device.accounts.host_bytes == 600 * ROW_BYTES
    assert torch.equal(room.value(0, 2), rows(600)[5:7])


def test_spare_uploads_go_when_the_host_has_no_room() -> None:
    room = Room(2**20, 1, keep_bytes=2**21, host_bytes=700 * ROW_BYTES)
    room.upload(0, 1, rows(600))
    room.do(0, Free((1,)))
    assert room.store.size_bytes == 600 * ROW_BYTES
    room.upload(0, 2, rows(200))
    assert room.device.evict(room.place(0, 2))
    assert (room.store.size_bytes, room.device.accounts.evicted[Gone.UPLOADS]) == (0, 1)
    assert torch.equal(room.value(0, 2), rows(200))


def test_sizes_that_change_in_place_are_counted() -> None:
    room = Room(2**20)
    room.upload(0, 1, rows(4))
    room.do(0, Run(3, (1,), [0, 0, 2], (2,)), Run(6, (1,), [[8 * SIDE], 1.0], ()))
    assert room.device.accounts.device_bytes == 8 * ROW_BYTES
    assert room.services[0].held_bytes == 8 * ROW_BYTES
    room.do(0, Free((1, 2)))
    assert room.device.accounts.device_bytes == 0


# Ahead of need, and last of all.


def test_what_is_cold_goes_ahead_of_need_and_what_was_just_used_stays() -> None:
    room = Room(10 * ROW_BYTES)
    room.upload(0, 1, rows(4))
    room.clock.now_s += 2 * COLD_S
    room.upload(0, 2, rows(5))
    assert room.place(0, 1).state is State.MOVED
    assert room.place(0, 2).state is State.HERE
    assert room.device.tier is PressureLevel.NORMAL
    room.upload(0, 3, rows(5))
    assert room.device.tier is PressureLevel.CRITICAL, "everything was just used"


def test_a_cache_somebody_decodes_with_goes_only_if_nothing_else_is_left() -> None:
    room = Room(30 * ROW_BYTES, 2)
    room.upload(0, 1, rows(4))
    room.upload(0, 2, rows(1, 1))
    room.do(0, Run(8, (1, 2), [], (3, 4)), Free((1,)))
    cache = room.place(0, 3)
    assert cache.role is Role.KV_CACHE
    room.upload(1, 1, rows(22))
    room.upload(1, 2, rows(24))
    assert cache.state is State.HERE
    assert room.device.accounts.evicted[Gone.ACTIVE_KV_CACHE] == 0
    room.upload(1, 3, rows(28))
    assert cache.state is State.MOVED
    assert room.device.accounts.evicted[Gone.ACTIVE_KV_CACHE] == 1
    room.clock.now_s += DECODE_S
    assert torch.equal(room.value(0, 3), torch.cat([rows(4), rows(1, 1)]))


def test_results_that_nobody_asked_for_go_first() -> None:
    room = Room(40 * ROW_BYTES, 2)
    room.upload(0, 1, rows(4))
    service, output = room.services[0], 2
    for _ in range(6):
        room.do(0, Run(1, (1, 1), [], (output,)))
        room.do(0, Run(7, (output,), [0, 0, 1], (output + 1, output + 2, output + 3)), Free(tuple(
            range(output, output + 4))))
        output += 10
    from djinn.wire.messages import RunDelta

    for _ in range(6):
        room.do(0, RunDelta(1))
        room.do(0, RunDelta(7), Free(tuple(range(output, output + 4))))
        output += 10
    assert service.look_ahead()
    assert room.device.accounts.ahead_bytes == 4 * ROW_BYTES
    room.upload(1, 1, rows(34))
    assert room.device.accounts.ahead_bytes == 0
    assert room.device.accounts.evicted[Gone.RESULTS_AHEAD] == 1
    assert room.place(0, 1).state is State.HERE


# No room.


def test_what_cannot_fit_is_refused_and_leaves_everything_as_it_was() -> None:
    room = Room(10 * ROW_BYTES)
    room.upload(0, 1, rows(4))
    room.do(0, Run(1, (1, 1), [], (2,)))
    result = room.upload(0, 3, rows(11))
    assert [failure.kind for failure in result.failures] == ["OutOfMemoryError"]
    message = result.failures[0].message
    assert f"{11 * ROW_BYTES} bytes are wanted" in message
    assert f"limit is {10 * ROW_BYTES}" in message
    assert f"{4 * ROW_BYTES} of weight" in message
    assert f"{4 * ROW_BYTES} of activation" in message
    assert f"{10 * ROW_BYTES} bytes can be made free for it: a batch of 90 % of this one" in message
    assert torch.equal(room.value(0, 1), rows(4))
    assert torch.equal(room.value(0, 2), 2 * rows(4))
    result, _ = room.do(0, fetch=[3])
    assert isinstance(result.items[0], Poisoned)
    assert room.device.accounts.refused == 1


def test_a_result_that_nobody_foresaw_is_let_go_if_there_is_no_room() -> None:
    room = Room(10 * ROW_BYTES, host_bytes=1)
    room.upload(0, 1, rows(6))
    result, _ = room.do(0, Run(4, (1, 1), [], (2,)))
    assert [failure.kind for failure in result.failures] == ["OutOfMemoryError"]
    assert room.device.accounts.held_bytes == 6 * ROW_BYTES
    assert torch.equal(room.value(0, 1), rows(6))


def test_what_is_about_to_be_used_is_not_what_makes_room() -> None:
    room = Room(12 * ROW_BYTES)
    for handle in (2, 3, 1):
        room.upload(0, handle, rows(4, handle))
    room.upload(0, 5, rows(2))
    assert torch.equal(room.value(0, 1), rows(4, 1))
    result, _ = room.do(0, Run(1, (2, 3), [], (4,)))
    assert not result.failures
    assert torch.equal(room.value(0, 4), rows(4, 2) + rows(4, 3))


@pytest.mark.parametrize("dropped", [2, 3])
def test_what_is_needed_is_not_dropped_while_something_else_that_is_needed_is_computed_again(dropped: int) -> None:
    size = 4 * ROW_BYTES
    # Which of the two comes first is up to their addresses.
    for _ in range(8):
        room = Room(3 * size)
        room.upload(0, 1, rows(4))
        room.do(0, Run(1, (1, 1), [], (2,)), Run(1, (1, 1), [], (3,)))
        assert room.device.evict(room.place(0, dropped))
        assert room.place(0, dropped).state is State.DROPPED
        result, _ = room.do(0, Run(1, (2, 3), [], (4,)))
        assert not result.failures, result
        assert torch.equal(room.value(0, 4), 4 * rows(4))


def test_a_session_that_ends_leaves_nothing_in_the_books() -> None:
    room = Room(10 * ROW_BYTES, 2)
    for session in (0, 1):
        room.upload(session, 1, rows(6, session))
    room.services[0].close()
    accounts = room.device.accounts
    assert (accounts.device_bytes + accounts.host_bytes, accounts.host_bytes >= 0) == (6 * ROW_BYTES, True)
    assert torch.equal(room.value(1, 1), rows(6, 1))
    room.services[1].close()
    assert (accounts.device_bytes, accounts.host_bytes, accounts.ahead_bytes) == (0, 0, 0)


SHORT_OF_MEMORY = """
import resource, sys
from djinn.wire.messages import Free, Run
from support.memory.room import *
torch.set_num_threads(1)
repeat = Program((template("aten::repeat", T, N),), (Step(0, (-1,), 1),), 1, (0,))
again = Program((template("aten::repeat", T, N), template("aten::repeat", T, N)),
                (Step(0, (-1,), 1), Step(1, (-1,), 1)), 1, (0, 1))
room = Room(2**40, host_bytes=1)
row = torch.ones(2**20 // 4)
room.upload(0, 1, row)
room.do(0, Define(50, repeat), Define(51, again),
        *(Run(51, (1,), [[1], [2]], (60, 61)) for _ in range(3)), Free((60, 61)))
room.do(0, Run(50, (1,), [[64]], (2,)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 88 * 2**20,) * 2)
program, numbers, outputs = {"first": (50, [[100]], (3,)), "compiled": (51, [[1], [100]], (4, 3))}[sys.argv[1]]
result, _ = room.do(0, Run(program, (1,), numbers, outputs))
print(room.place(0, 2).state.name, [failure.kind for failure in result.failures])
room.do(0, Free((3,)))
result, _ = room.do(0, Run(3, (2,), [0, 5, 7], (6,)))
assert not result.failures, result
print(room.value(0, 6).tolist())
result, _ = room.do(0, Run(50, (1,), [[4096]], (5,)))
print([failure.kind for failure in result.failures], "of weight" in result.failures[0].message)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the process's memory")
@pytest.mark.parametrize("run", ["first", "compiled"])
def test_where_the_device_has_no_memory_what_is_not_in_use_makes_room_and_the_step_is_made_once_more(run: str) -> None:
    done = run_python(SHORT_OF_MEMORY, run, has_djinn=True)
    assert done.stdout.splitlines() == ["DROPPED []", "[1.0, 1.0]", "['OutOfMemoryError'] True"], done.stderr
