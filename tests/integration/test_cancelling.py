"""What is not wanted any more is not computed: what a client has cancelled, or has left behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from djinn_transport_tcp.client import SocketConnection, connect
from tcp_support import frame, raw_socket

from djinn.kinds.transport import ConnectOptions
from djinn.model.program import NumberArgument, Program, Step, Template, TensorArgument
from djinn.model.schema import facts_of
from djinn.protocol.messages import PROTOCOL_VERSION, Batch, Define, Free, Hello, Poisoned, Run, Upload
from djinn.protocol.tensors import header_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="how much a process has computed is read from /proc")
FACTOR, COUNTER, PRODUCT = 1, 2, 3
SHORT, LONG = 1, 2
STEPS_OF_LONG = 60
NUMBERS = {SHORT: [1], LONG: [1] * STEPS_OF_LONG}


def products(count: int) -> Program:
    """Multiply an input by itself so many times, and count on another one, in place, how often that was."""
    def template(operator: Any, *arguments: Any) -> Template:
        return Template(operator.name(), facts_of(operator).digest, arguments)

    templates = (template(torch.ops.aten.mm.default, TensorArgument(), TensorArgument()),
                 template(torch.ops.aten.add_.Scalar, TensorArgument(), NumberArgument()))
    steps = [step for _ in range(count) for step in (Step(0, (-1, -1), 1), Step(1, (-2,), 0))]
    return Program(templates, tuple(steps), 2, (count - 1,))


class Working:
    """A session of its own with work that takes long.

    Args:
        address: Of the server.
        side: Extent of the matrices.
    """

    def __init__(self, address: str, side: int = 700) -> None:
        self.connection = connect(address, ConnectOptions(connect_timeout_s=60, request_timeout_s=120, resume=True))
        counter = torch.zeros((), dtype=torch.int64)
        factor = torch.full((side, side), 1e-3)
        self.connection.request(Batch([
            Upload(FACTOR, header_of(factor)), Upload(COUNTER, header_of(counter)), Define(SHORT, products(1)),
            Define(LONG, products(STEPS_OF_LONG))], synchronize=True), [factor, counter])

    def submit(self, program: int) -> None:
        self.connection.submit(Batch([Run(program, (FACTOR, COUNTER), NUMBERS[program], (PRODUCT,))]), ())

    def counted(self) -> int:
        result, data = self.connection.request(Batch(fetch=(COUNTER,)), ())
        assert len(data) == 1, result.failures
        return int(data[0])


def cancel(connection: SocketConnection) -> None:
    """Take a session up again as a client does that was interrupted, and say so."""
    hello = Hello(PROTOCOL_VERSION, "", "", sys.byteorder, resume=connection.welcome.resume,
                  answered=connection._end.answered, cancelled=connection._sequence)
    with connection._in_use:
        sock = raw_socket(connect_only(connection))
        sock.sendall(frame(hello))
        assert sock.recv(32)
        sock.close()


def connect_only(connection: SocketConnection) -> SocketConnection:
    from djinn_transport_tcp.opening import open_tcp
    return SocketConnection(connection.address, open_tcp(connection.address, ConnectOptions()))


@pytest.fixture
def working(server: Any) -> Iterator[Working]:
    made = Working(server.address)
    yield made
    made.connection.close()


@pytest.mark.parametrize("program", [SHORT, LONG], ids=["between programs", "between steps"])
def test_what_is_cancelled_is_not_run_and_the_session_lives_on(working: Working, program: int) -> None:
    connection = working.connection
    for _ in range(2):
        working.submit(SHORT)  # from the second time on, programs are compiled
    assert working.counted() == 2
    if program == LONG:
        # Twice, so that the one that is cut short is compiled.
        working.submit(LONG)
        assert working.counted() == 2 + STEPS_OF_LONG
    before, runs = working.counted(), 400 if program == SHORT else 8
    began = time.monotonic()
    for _ in range(runs):
        working.submit(program)
    time.sleep(0.1)
    cancel(connection)
    result, _ = connection.request(Batch(fetch=(PRODUCT,)), ())
    took_s = time.monotonic() - began
    assert isinstance(result.items[0], Poisoned)
    assert {failure.kind for failure in result.failures} == {"OperationCancelledError"}
    ran = working.counted() - before
    whole = runs * (1 if program == SHORT else STEPS_OF_LONG)
    assert ran < whole / 2, f"{ran} of {whole} steps in {took_s:.2f} s"
    working.submit(SHORT)
    assert working.counted() == before + ran + 1
    result, data = connection.request(Batch(fetch=(PRODUCT,)), ())
    assert not result.failures
    assert len(data) == 1
    connection.submit(Batch([Free((PRODUCT,))]), ())
