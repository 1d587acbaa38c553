"""Sessions, values and calls that an event loop awaits, on asyncio and on trio: the loop goes on meanwhile."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from support.clients.interrupted import Work

import djinn
from djinn.errors import OperationCancelledError, TransportError
from djinn.session import runtime
from djinn_plugins.sessions.asynchronous import calls

DEVICE = "remote_accelerator:0"
TURNS = 50
pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    yield
    djinn.shutdown()


@pytest.fixture(params=["local", "tcp"])
def address(request: pytest.FixtureRequest) -> str:
    return "local://" if request.param == "local" else request.getfixturevalue("server").address


class Gate(threading.Event):
    """What holds an operation, and whether one has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = threading.Event()


_gates: list[Gate] = []


@torch.library.custom_op("test_async::hold", mutates_args=())
def hold(tensor: torch.Tensor) -> torch.Tensor:
    _gates[-1].is_reached.set()
    _gates[-1].wait()
    return tensor.clone()


hold.register_fake(torch.empty_like)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened by a test, so that an operation that holds at it may end."""
    made = Gate()
    _gates.append(made)
    yield made
    made.set()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for happens in threads that know no loop
        await anyio.sleep(0.001)


def waiting() -> int:
    """How many calls wait for their session's executor."""
    return sum(call._wake is not None for call in calls._awaited)


async def late(lateness_s: list[float]) -> None:
    """Sleep for a millisecond again and again, and note by how much longer it took."""
    while True:
        began = time.perf_counter()
        await anyio.sleep(0.001)
        lateness_s.append(time.perf_counter() - began - 0.001)


async def test_a_session_begins_gives_values_and_ends(address: str) -> None:
    async with djinn.session(address) as session:
        ours = torch.arange(6.0).reshape(2, 3)
        x = ours.to(DEVICE)
        tree = {"sum": x.sum(), "parts": [x + 1, (x @ x.T).relu()], "number": 7, "ours": ours}
        made = await djinn.materialize_async(tree)
        assert torch.equal(made["sum"], ours.sum())
        assert torch.equal(made["parts"][0], ours + 1)
        assert torch.equal(made["parts"][1], ours @ ours.T)
        assert made["number"] == 7
        assert made["ours"] is ours
        first, second = await djinn.materialize_async(x, x * 2)
        assert torch.equal(first * 2, second)
        assert await djinn.run_async(lambda tensor, *, by: (tensor * by).sum().item(), x, by=2) == 30
    assert session.closed
    assert not djinn.is_initialized()


async def test_a_block_ends_its_own_session_only() -> None:
    with djinn.session() as first:
        assert djinn.ensure_initialized() is first
    assert first.closed
    with pytest.raises(ZeroDivisionError):
        async with djinn.session() as second:
            1 / 0  # noqa: B018  # raises
    assert second.closed
    async with djinn.session():
        third = await djinn.init_async()
    assert not third.closed


async def test_errors_arrive(address: str) -> None:
    async with djinn.session(address):
        index = torch.tensor([7]).to(DEVICE)
        with pytest.raises((IndexError, RuntimeError)):
            await djinn.materialize_async(torch.zeros(3).to(DEVICE)[index])
    with pytest.raises(TransportError, match="127.0.0.1:1"):
        await djinn.init_async("tcp://127.0.0.1:1")


async def test_the_loop_is_as_punctual_as_without_a_call(gate: Gate) -> None:
    held_s = 0.3
    await djinn.init_async()
    x = torch.ones(3).to(DEVICE)

    async def measured(call: Callable[[Any], Any]) -> list[float]:
        gate.clear()
        lateness_s: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late, lateness_s)
            await until(lambda: lateness_s)
            threading.Timer(held_s, gate.set).start()
            await call(hold(x))
            turns = len(lateness_s)
            await until(lambda: len(lateness_s) > turns)
            tasks.cancel_scope.cancel()
        return lateness_s

    async def blocking(tensor: Any) -> None:
        djinn.materialize(tensor)

    blocked, free = await measured(blocking), await measured(djinn.materialize_async)
    assert max(blocked) > held_s / 2
    assert statistics.median(free) < held_s / 10, "a loop that waits is late, too"
    assert len(free) > len(blocked)


async def test_a_cancelled_call_cancels_what_it_waits_for_and_the_session_lives_on(address: str) -> None:
    """Twice, so that the second time finds what the first has left. The work would take minutes."""
    async with djinn.session(address):
        work = await djinn.run_async(Work)
        for _ in range(2):
            await djinn.run_async(work.begin)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(djinn.materialize_async, work.product.sum())
                await until(waiting)
                for _ in range(TURNS):
                    await anyio.sleep(0.001)
                assert waiting()
                tasks.cancel_scope.cancel()
            await djinn.run_async(work.check)


async def test_many_tasks_at_once(address: str) -> None:
    count = 2 * calls.MAX_CALLS + 3
    made: dict[int, torch.Tensor] = {}
    async with djinn.session(address):
        x = torch.arange(4.0).to(DEVICE)

        async def fetch(number: int) -> None:
            made[number] = await djinn.materialize_async(x * number)

        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(fetch, number)
    assert {number: tensor.tolist() for number, tensor in made.items()} == {
        number: (torch.arange(4.0) * number).tolist() for number in range(count)}


async def test_a_cancelled_call_takes_nothing_from_others(gate: Gate) -> None:
    await djinn.init_async()
    x = torch.ones(3).to(DEVICE)
    held, made = hold(x) + 1, []

    async def other() -> None:
        made.append(await djinn.materialize_async(x + 2))

    scope = anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await djinn.materialize_async(held)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled)
        await until(waiting)
        tasks.start_soon(other)
        await until(lambda: len(calls._awaited) == 2)
        scope.cancel()
        await until(lambda: calls._abandoned)
        gate.set()
    assert scope.cancelled_caught
    assert made[0].tolist() == [3, 3, 3]
    assert (await djinn.materialize_async(held)).tolist() == [2, 2, 2]


async def test_once_no_call_waits_the_abandoned_work_is_cancelled(gate: Gate) -> None:
    await djinn.init_async()
    x = torch.ones(3).to(DEVICE)
    kept = x * 5
    held = hold(x)
    lost = held + 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(djinn.materialize_async, lost)
        # Whatever has not begun is cancelled.
        await until(gate.is_reached.is_set)
        tasks.start_soon(djinn.materialize_async, x + 2)
        await until(lambda: len(calls._awaited) == 2)
        tasks.cancel_scope.cancel()
    await until(lambda: not calls._abandoned)
    gate.set()
    with pytest.raises(OperationCancelledError, match="Compute it again"):
        await djinn.materialize_async(lost)
    assert (await djinn.materialize_async(kept + 1)).tolist() == [6, 6, 6]


async def test_the_loop_records_and_calls_while_another_task_waits(gate: Gate) -> None:
    """The gate is opened by the loop, so a loop that waited for the executor would wait for ever."""
    await djinn.init_async(flush_every=8)
    x = torch.ones(3).to(DEVICE)
    made = []

    async def fetch() -> None:
        made.append(await djinn.materialize_async(hold(x)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fetch)
        await until(waiting)
        y = x
        for _ in range(100):
            y = y + 1
        tasks.start_soon(djinn.run_async, lambda: torch.ones(100_000).to(DEVICE))
        await until(lambda: len(calls._awaited) == 2)
        assert not made
        gate.set()
    assert (await djinn.materialize_async(y)).tolist() == [101, 101, 101]


async def test_no_session_runs_after_init_was_cancelled(monkeypatch: pytest.MonkeyPatch,
                                                        gate: Gate) -> None:
    began = threading.Event()
    monkeypatch.setattr(runtime, "_init_hooks", [lambda: (began.set(), gate.wait())])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(djinn.init_async)
        await until(began.is_set)
        tasks.cancel_scope.cancel()
    session = runtime._session
    assert session is not None
    gate.set()
    await until(lambda: not djinn.is_initialized())
    assert session.closed


async def test_a_call_that_never_began_is_not_made() -> None:
    done = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await djinn.run_async(done.append, 1)
    assert scope.cancelled_caught
    assert not done
    assert not calls._awaited
    assert not calls._abandoned


async def test_a_block_belongs_to_its_task_and_to_those_that_it_starts(address: str) -> None:
    await djinn.init_async(address)
    model = torch.nn.Linear(4, 4).to(DEVICE)
    graphs: dict[int, list[str]] = {}

    async def block(count: int) -> None:
        async def within() -> None:
            await anyio.lowlevel.checkpoint()
            torch.zeros(1).exp()

        with djinn.capture(model) as captured:
            x = torch.ones(2, 4)
            for _ in range(count):
                x = x * 2
                with djinn.capture():
                    await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as inner:
                inner.start_soon(within)
            y = model(x)
            await anyio.lowlevel.checkpoint()
            model.zero_grad()
            y.sum().backward()
            with djinn.disable_interception():
                await anyio.lowlevel.checkpoint()
                assert torch.ones(1).device.type == "cpu"
            assert djinn.is_capturing()
        graphs[count] = [node.operation for node in captured.graph]
        assert [node.operation for node in djinn.get_graph()] == graphs[count]
        result = djinn.execute(djinn.schedule(captured))
        assert torch.equal(await djinn.materialize_async(result), await djinn.materialize_async(y))

    async def outside() -> None:
        for _ in range(TURNS):
            assert torch.ones(1).device.type == "cpu"
            assert not djinn.is_capturing()
            assert djinn.should_intercept() is False
            (torch.ones(1, device=DEVICE) / 2).requires_grad_().square().backward()
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        for count in (1, 4, 2):
            tasks.start_soon(block, count)
        tasks.start_soon(outside)
    for count, operations in graphs.items():
        assert operations[:count + 1] == ["aten::ones", *["aten::mul.Tensor"] * count]
        assert operations[count + 1:] == graphs[1][2:]
        assert "aten::div.Tensor" not in operations
    assert torch.ones(1).device.type == "cpu"
