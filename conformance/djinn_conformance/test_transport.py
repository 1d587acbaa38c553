"""Laws of transports, including the server's end of a session."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from djinn.errors import ConfigurationError, DjinnError, TransportError
from djinn.kinds import Connection, Transport
from djinn.wire.messages import (
    Batch,
    Define,
    Description,
    Free,
    Peer,
    Plain,
    Poisoned,
    Receive,
    Result,
    Run,
    Send,
    Upload,
)
from djinn.wire.tensors import DTYPES, header_of
from djinn_conformance.assertions import (
    bytes_of,
    describe,
    expect,
    expect_equal,
    expect_raises,
    expect_same_tensor,
    steps,
)
from djinn_conformance.awaiting_server import AwaitingServer
from djinn_conformance.capabilities import connect_options, listen_options, listening_address
from djinn_conformance.harness import InProcessServer, open_executor
from djinn_conformance.laws import law
from djinn_conformance.programs import Recording, Ref, call, pieces
from djinn_conformance.strategies import dense_tensors
from djinn_conformance.subjects import Subject
from djinn_plugins.common.kinds.transport import Channel
from djinn_plugins.common.net.listening import listen

_PATIENCE_S = 10.0
_LARGE = 2**20 + 3
"""Elements of a tensor that no buffer in between holds whole."""


def _program(operator: str, number: int) -> Define:
    """Define a program that changes its one input in place by one number."""
    recording = Recording((torch.zeros(1),), (call(operator, Ref(-1), 1, results=0),))
    [piece] = pieces(recording, [], [])
    return Define(number, piece.program)


_MULTIPLY, _ADD = _program("aten::mul_.Scalar", 1), _program("aten::add_.Scalar", 2)
_NEGATE = Define(3, pieces(Recording((torch.zeros(1),), (call("aten::neg", Ref(-1)),)), [], [0])[0].program)


def _upload(connection: Connection, tensors: Sequence[torch.Tensor], first: int = 1) -> None:
    uploads: list[Any] = [Upload(first + index, header_of(tensor)) for index, tensor in enumerate(tensors)]
    connection.submit(Batch(uploads), tensors)


def _fetch(connection: Connection, *handles: int) -> list[torch.Tensor]:
    result, tensors = connection.request(Batch(fetch=handles), [])
    expect_equal(len(result.items), len(handles), "number of items", connection.address)
    expect_equal(len(tensors), len(handles), "number of tensors", connection.address)
    return tensors


@law("transport.batch_order", effort=0.3)
@given(steps=st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(2, 9), st.booleans()), min_size=1, max_size=30))
@example(steps=[(1, 2, False), (2, 3, False), (1, 4, False), (2, 5, False)])
def test_batch_order(subject: Subject, place: InProcessServer, steps: list[tuple[int, int, bool]]) -> None:
    """Multiply and add alternately, each in a separate batch, some of them with an answer."""
    wanted = 1
    with closing(place.connect()) as connection:
        _upload(connection, [torch.tensor([1])])
        connection.submit(Batch([_MULTIPLY, _ADD]), [])
        for program, number, asks in steps:
            wanted = (wanted * number if program == 1 else wanted + number) % 2**64
            batch = Batch([Run(program, (1,), [number], ())], synchronize=asks)
            if asks:
                connection.request(batch, [])
            else:
                connection.submit(batch, [])
        [got] = _fetch(connection, 1)
        expect_equal(got.item() % 2**64, wanted, "value after all batches", f"{subject}: {steps}")


@law("transport.tensors_exact")
@given(tensors=st.lists(dense_tensors(tuple(DTYPES.values())), min_size=1, max_size=4))
def test_tensors_exact(subject: Subject, place: InProcessServer, tensors: list[torch.Tensor]) -> None:
    """Send tensors back and forth."""
    with closing(place.connect()) as connection:
        _upload(connection, tensors)
        for sent, got in zip(tensors, _fetch(connection, *range(1, len(tensors) + 1)), strict=True):
            where = f"{subject}: {sent.dtype} {tuple(sent.shape)} {sent.stride()} among {len(tensors)}"
            expect_equal((got.dtype, tuple(got.shape)), (sent.dtype, tuple(sent.shape)), "dtype and size", where)
            if sent.numel():
                expect_equal(steps(got.shape, got.stride()), steps(sent.shape, sent.stride()), "stride", where)
            expect_equal(bytes_of(got), bytes_of(sent), "bits", where)


@law("transport.one_reply_per_request", effort=0.3)
@given(requests=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(1, 5), max_size=6), st.booleans()),
                         min_size=1, max_size=8))
def test_one_reply_per_request(
    subject: Subject, place: InProcessServer, requests: list[tuple[int, list[int], bool]]
) -> None:
    """Request various values after various batches without an answer; one of the values does not exist."""
    where = f"{subject}: {requests}"
    with closing(place.connect()) as connection:
        _upload(connection, [torch.full((handle,), handle) for handle in range(1, 5)])
        connection.submit(Batch([_NEGATE]), [])
        for silent, handles, fails in requests:
            for _ in range(silent):
                connection.submit(Batch([Run(3, (4,), [], (9,)), Free((9,))]), [])
            if fails:
                connection.submit(Batch([Run(7, (), [], (8,))]), [])
            result, tensors = connection.request(
                Batch(fetch=tuple(handles), describe=tuple(handles), synchronize=True), [])
            _check_reply(result, tensors, handles, fails, where)


def _check_reply(result: Result, tensors: list[torch.Tensor], handles: list[int], fails: bool, where: str) -> None:
    items, rest = result.items, iter(tensors)
    expect_equal(len(items), 2 * len(handles), "number of items", where)
    for handle, item, described in zip(handles, items, items[len(handles) :], strict=False):
        if handle == 5:
            expect(isinstance(item, Poisoned) and isinstance(described, Poisoned), "items of an unknown value",
                   got=(item, described), wanted="poison", where=where)
            continue
        expect_same_tensor(next(rest), torch.full((handle,), handle), f"value {handle}", where)
        expect(isinstance(described, Description) and described.size == (handle,), f"description of {handle}",
               got=described, wanted=f"size ({handle},)", where=where)
    unknown = 2 * handles.count(5) + int(fails)
    expect_equal(len(result.failures), unknown, "number of failures in the answer", where)


@law("transport.ownership", effort=0.1)
@given(size=st.sampled_from([1, 1000, _LARGE]), asks=st.booleans())
def test_ownership(subject: Subject, place: InProcessServer, size: int, asks: bool) -> None:
    """Overwrite sent tensors as soon as the call returns, and overwrite received ones."""
    where = f"{subject}: {size} elements"
    wanted = torch.arange(size, dtype=torch.int32)
    with closing(place.connect()) as connection:
        sent = wanted.clone()
        if asks:
            connection.request(Batch([Upload(1, header_of(sent))], synchronize=True), [sent])
        else:
            _upload(connection, [sent])
        sent.fill_(-1)
        [first] = _fetch(connection, 1)
        expect(torch.equal(first, wanted), "value after its source changed", got=first,
               wanted="the value as it was sent", where=where)
        first.fill_(-2)
        [second] = _fetch(connection, 1)
        expect(torch.equal(second, wanted), "value after a copy of it changed", got=second,
               wanted="the value as it was sent", where=where)


@law("transport.sessions_separate", effort=0.1)
@given(seeds=st.lists(st.integers(0, 1000), min_size=2, max_size=4, unique=True))
def test_sessions_separate(subject: Subject, place: InProcessServer, seeds: list[int]) -> None:
    """Use the same handles and program numbers in several sessions for different things: alternately, then at once."""
    with ExitStack() as stack:
        sessions = [_Session(stack.enter_context(closing(place.connect())), seed) for seed in seeds]
        for _ in range(3):
            for session in sessions:
                session.step()
        with ThreadPoolExecutor(len(sessions)) as pool:
            list(pool.map(_Session.run, sessions))
        for seed, session in zip(seeds, sessions, strict=True):
            [got] = _fetch(session.connection, 1)
            expect_equal(got.item(), seed + 20 * (seed % 7 + 1), f"value of the session of {seed}",
                         f"{subject}: sessions of {seeds}")


class _Session:
    """A session that adds its number to its value twenty times."""

    def __init__(self, connection: Connection, seed: int) -> None:
        self.connection = connection
        self._amount = seed % 7 + 1
        self._left = 20
        _upload(connection, [torch.tensor([seed])])
        connection.submit(Batch([_program("aten::add_.Scalar", 1)]), [])

    def step(self) -> None:
        """Add once."""
        self._left -= 1
        self.connection.submit(Batch([Run(1, (1,), [self._amount], ())]), [])

    def run(self) -> None:
        """Add the remaining times."""
        while self._left:
            self.step()


@law("transport.error_names_address")
def test_error_names_address(subject: Subject, plugin: Transport) -> None:
    """Close the other side before and during a session."""
    with InProcessServer(subject) as short:
        connection = short.connect()
        _upload(connection, [torch.zeros(4)])
        _fetch(connection, 1)
    started = time.monotonic()
    for attempt in ("the first request", "a later request"):
        expect_raises(TransportError, lambda: connection.request(Batch(fetch=(1,)), []),
                      f"{attempt} after the other side went away", str(subject), naming=short.address)
    expect_raises(TransportError, lambda: connection.submit(Batch([Free((1,))]), []), "a later batch", str(subject),
                  naming=short.address)
    connection.close()
    options = connect_options(subject, connect_timeout_s=5.0)
    expect_raises(TransportError, lambda: plugin.connect(short.address, options),
                  "connecting where nobody listens any more", str(subject), naming=short.address)
    took_s = time.monotonic() - started
    expect(took_s < _PATIENCE_S, "time", got=f"{took_s:.1f} s", wanted=f"less than {_PATIENCE_S} s", where=str(subject))


@law("transport.address_checked")
def test_address_checked(subject: Subject, plugin: Transport) -> None:
    """Use addresses with another scheme, and text that is not an address."""
    options = connect_options(subject, connect_timeout_s=1.0, open_executor=open_executor)
    for address in (f"not-{plugin.scheme}://127.0.0.1:1", "no address at all"):
        for name, action in (
            ("connect", lambda address=address: plugin.connect(address, options)),
            ("listen", lambda address=address: listen(plugin, address, listen_options(subject))),
        ):
            error = expect_raises(DjinnError, action, f"{name}({address!r})", str(subject), naming=address)
            expect(isinstance(error, (ConfigurationError, TransportError)), f"error of {name}({address!r})", got=error,
                   wanted="ConfigurationError or TransportError", where=str(subject))


@law("transport.closed_is_final")
def test_closed_is_final(subject: Subject, place: InProcessServer) -> None:
    """Close twice, then use it."""
    connection = place.connect()
    _upload(connection, [torch.zeros(4)])
    connection.close()
    connection.close()
    for name, action in (
        ("submit", lambda: connection.submit(Batch([Free((1,))]), [])),
        ("request", lambda: connection.request(Batch(fetch=(1,)), [])),
    ):
        expect_raises(TransportError, action, f"{name} after close", str(subject), naming=connection.address)
    connection.close()


@law("transport.listener_closes")
def test_listener_closes(subject: Subject, plugin: Transport) -> None:
    """Close a listener while a thread waits for connections."""
    listener = listen(plugin, listening_address(subject), listen_options(subject))
    accepted: list[object] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True)
    thread.start()
    time.sleep(0.1)
    listener.close()
    thread.join(_PATIENCE_S / 2)
    expect_equal(accepted, [None], "what accept gave once the listener was closed", str(subject))
    listener.close()
    expect_equal(listener.accept(), None, "what accept gives afterwards", str(subject))


@law("transport.awaited_handshakes")
def test_awaited_handshakes(subject: Subject, plugin: Transport) -> None:
    """Answer the first client last."""
    sent = [torch.arange(4) + number for number in range(3)]
    options = connect_options(subject, connect_timeout_s=_PATIENCE_S / 2)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        with closing(plugin.connect(place.address, options)) as session:
            _upload(session, [tensor])
            return _fetch(session, 1)[0]

    with AwaitingServer(subject, len(sent)) as place, ThreadPoolExecutor(len(sent)) as threads:
        received = list(threads.map(call, sent))
    for tensor, answer in zip(sent, received, strict=True):
        expect_same_tensor(answer, tensor, "a tensor after an awaited handshake", str(subject))


@law("transport.awaits_end")
def test_awaits_end(subject: Subject, plugin: Transport) -> None:
    """Cancel a wait, then connect."""
    with AwaitingServer(subject, 1, cancel_first=True) as place:
        options = connect_options(subject, connect_timeout_s=_PATIENCE_S / 2)
        with closing(plugin.connect(place.address, options)) as session:
            _upload(session, [torch.ones(1)])
            _fetch(session, 1)
        expect(place.cancelled_s < _PATIENCE_S / 4, "time until a cancelled wait ends",
               got=f"{place.cancelled_s:.1f} s", wanted="none", where=str(subject))


@law("transport.counters_monotonic", effort=0.1)
@given(sizes=st.lists(st.sampled_from([0, 1, 1000, 100_000]), min_size=1, max_size=6))
def test_counters_monotonic(subject: Subject, place: InProcessServer, sizes: list[int]) -> None:
    """Read the counters between transfers."""
    with closing(place.connect()) as connection:
        travels = place.listens
        for size in sizes:
            before = connection.bytes_sent, connection.bytes_received
            tensor = torch.zeros(size, dtype=torch.uint8)
            _upload(connection, [tensor])
            _fetch(connection, 1)
            grown = connection.bytes_sent - before[0], connection.bytes_received - before[1]
            least = size if travels else 0
            expect(min(grown) >= least, "growth of bytes_sent and bytes_received", got=grown,
                   wanted=f"at least {least} each", where=f"{subject}: {size} bytes there and back, of {sizes}")


@st.composite
def _views(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]:
    """Draw a flat tensor, and size, stride and offset of a view of it."""
    size = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    stride = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 40]), min_size=len(size), max_size=len(size)))
    offset = draw(st.integers(0, 3))
    length = offset + 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True) if extent)
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    flat = torch.randint(0, 2 if dtype == "bool" else 256, (length * DTYPES[dtype].itemsize,), generator=generator,
                         dtype=torch.uint8).view(DTYPES[dtype])
    return flat, tuple(size), tuple(stride), offset


@law("transport.transfers", effort=0.3)
@given(views=st.lists(_views(), min_size=1, max_size=4), order=st.permutations(range(6)))
@example(views=[(torch.arange(12, dtype=torch.int16), (3, 4), (4, 1), 0)], order=(0, 1, 2, 3, 4, 5))
@example(views=[(torch.arange(12, dtype=torch.int16), (2, 3), (1, 4), 2),
                (torch.arange(100.0), (4, 3), (33, 0), 0)], order=(5, 4, 3, 2, 1, 0))
def test_transfers(
    subject: Subject, place: InProcessServer, views: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]],
    order: list[int],
) -> None:
    """Send values with all kinds of memory layouts, one that is not a tensor, and one that does not exist."""
    shown = [(str(flat.dtype), size, stride, offset) for flat, size, stride, offset in views]
    where = f"{subject}: {shown}, received in order {order}"
    count = len(views)
    with closing(place.connect()) as here, closing(place.connect()) as there:
        _upload(here, [flat for flat, _, _, _ in views] + [torch.tensor(7)])
        made = [Recording((torch.zeros(1),), (call("aten::as_strided", Ref(-1), size, stride, offset),))
                for _, size, stride, offset in views]
        made.append(Recording((torch.tensor(7),), (call("aten::_local_scalar_dense", Ref(-1)),)))
        commands: list[Any] = []
        for number, piece in enumerate((pieces(recording, [], [0])[0] for recording in made), 1):
            commands += [Define(number, piece.program), Run(number, (number,), list(piece.numbers), (number + 10,))]
        address = place.address if place.listens else f"{place.address}{there.welcome.mailbox.hex()}"
        commands.append(Peer(3, address, there.welcome.mailbox))
        commands += [Send(number, 3, number) for number in range(11, 11 + count + 2)]
        here.submit(Batch(commands), [])
        # The sent value must not include this change.
        multiply = _program("aten::mul_.Scalar", 99)
        here.submit(Batch([multiply, *(Run(99, (number,), [0], ()) for number in range(1, count + 1)
                                       if not _is_exotic(views[number - 1][0]))]), [])
        numbers = tuple(range(11, 11 + count + 2))
        received = [Receive(numbers[place_of], numbers[place_of], here.welcome.session)
                    for place_of in order if place_of < len(numbers)]
        own, _ = here.request(Batch(synchronize=True), [])
        # After this line, no wait can be in vain.
        here.close()
        result, tensors = there.request(Batch(list(received), fetch=numbers, describe=numbers), [])
        _check_views(result, tensors, views, where)
        poison = result.items[count + 1]
        origins = [(failure.source, failure.source_identity) for failure in result.failures]
        wanted = [(here.welcome.session, failure.identity) for failure in own.failures]
        expect(isinstance(poison, Poisoned) and origins == wanted, "what was received for a value that there is not",
               got=(poison, result.failures), wanted=f"poison, by the one failure {wanted}", where=where)
        result, _ = there.request(Batch([Receive(50, 50, here.welcome.session)], fetch=(50,)), [])
        expect(isinstance(result.items[0], Poisoned) and bool(result.failures), "what was received from one that ended",
               got=result, wanted="a failure", where=where)


def _is_exotic(tensor: torch.Tensor) -> bool:
    """Whether the tensor does not even support multiplication everywhere."""
    return tensor.dtype not in {torch.float32, torch.float64, torch.int32, torch.int64}


def _check_views(
    result: Result, tensors: list[torch.Tensor],
    views: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]], where: str,
) -> None:
    described = result.items[len(views) + 2:]
    expect_equal(result.items[len(views)], Plain(7), "the plain value", where)
    for tensor, item, (flat, size, stride, offset) in zip(tensors, described, views, strict=False):
        wanted = flat.as_strided(size, stride, offset)
        if isinstance(item, Description):
            expect_equal((item.size, item.stride), (size, stride), "size and stride of what was received", where)
        expect(isinstance(item, Description) and tensor.dtype == wanted.dtype
               and bytes_of(tensor) == bytes_of(wanted), "what was received",
               got=(item, describe(tensor)), wanted=describe(wanted), where=where)


class _Breaking:
    """A channel whose connection breaks at certain messages, and on which some messages are duplicated.

    Args:
        channel: The channel.
        plan: Events for the next messages of the session, on any connection: a break "before" the message is read,
            "after" it, or "instead" of its answer; or the message arrives "twice".
    """

    def __init__(self, channel: Channel, plan: list[str]) -> None:
        self._channel = channel
        self._plan = plan
        self._again: tuple[int, Any, list[torch.Tensor]] | None = None
        self._breaks_answer = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def receive(self) -> tuple[int, Any, list[torch.Tensor]] | None:
        if self._again is not None:
            again, self._again = self._again, None
            return again
        received = self._channel.receive()
        if received is None or not isinstance(received[1], Batch) or not self._plan:
            return received
        event = self._plan.pop(0)
        if event == "before":
            self._break("before a batch was taken in")
        if event == "after":
            self._channel.close()
        self._breaks_answer = event == "instead"
        if event == "twice":
            self._again = received[0], received[1], [tensor.clone() for tensor in received[2]]
        return received

    def send(self, sequence: int, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        if self._breaks_answer and isinstance(message, Result):
            self._breaks_answer = False
            self._break("instead of an answer")
        self._channel.send(sequence, message, tensors)

    def _break(self, when: str) -> None:
        self._channel.close()
        raise TransportError(f"The connection of {self._channel.peer} was broken {when}.")


_EVENTS = st.sampled_from(["nothing", "before", "after", "instead", "twice"])


@law("transport.exactly_once", effort=0.2)
@given(plan=st.lists(_EVENTS, min_size=1, max_size=12), asks=st.lists(st.booleans(), min_size=4, max_size=12))
@example(plan=["nothing", "nothing", "instead", "twice", "before", "after"], asks=[True, True, False, True, False])
@example(plan=["nothing", "nothing", "twice", "twice", "instead", "instead"], asks=[False, True, True, True, False])
def test_exactly_once(subject: Subject, plan: list[str], asks: list[bool]) -> None:
    """Multiply and add alternately while connections break, and request the value now and then."""
    where = f"{subject}: {plan}, {asks}"
    left = list(plan)
    with (InProcessServer(subject, lambda channel: _Breaking(channel, left)) as place,
          closing(place.connect()) as connection):
        _upload(connection, [torch.tensor([1])])
        connection.submit(Batch([_MULTIPLY, _ADD]), [])
        wanted = 1
        for step, is_asked in enumerate(asks):
            wanted = (wanted * 3 if step % 2 else wanted + 5) % 2**64
            batch = Batch([Run(1 if step % 2 else 2, (1,), [3 if step % 2 else 5], ())],
                          fetch=(1,) if is_asked else ())
            if not is_asked:
                connection.submit(batch, [])
                continue
            result, tensors = connection.request(batch, [])
            expect_equal(result.failures, (), "failures", where)
            expect_equal(tensors[0].item() % 2**64, wanted, f"the answer to step {step}", where)
        [got] = _fetch(connection, 1)
        expect_equal(got.item() % 2**64, wanted, "value after all batches", where)


@law("transport.resumed", effort=0.2)
@given(plan=st.lists(st.sampled_from(["before", "after", "instead"]), min_size=1, max_size=4),
       sizes=st.lists(st.sampled_from([1, 1000, 2**18, _LARGE]), min_size=1, max_size=4))
@example(plan=["before", "after", "instead"], sizes=[_LARGE, 1000])
def test_resumed(subject: Subject, plan: list[str], sizes: list[int]) -> None:
    """Upload and fetch while connections break, and overwrite submitted tensors."""
    where = f"{subject}: {plan}, {sizes}"
    left = list(plan)
    with (InProcessServer(subject, lambda channel: _Breaking(channel, left)) as place,
          closing(place.connect()) as connection):
        for handle, size in enumerate(sizes, 1):
            sent = torch.full((size,), handle, dtype=torch.int32)
            _upload(connection, [sent], handle)
            sent.fill_(-1)
        for handle, size in enumerate(sizes, 1):
            [got] = _fetch(connection, handle)
            expect(torch.equal(got, torch.full((size,), handle, dtype=torch.int32)), f"value {handle}", got=got,
                   wanted="as it was sent", where=where)
        _fetch(connection, *range(1, len(sizes) + 1))
        broken = len(plan) - len(left)
        counted = getattr(connection, "reconnections", 0)
        expect(0 < counted <= broken + 1, "reconnections", got=counted, wanted=f"1 to {broken + 1}", where=where)
