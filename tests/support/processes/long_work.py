"""A session with work that takes long, and counts itself."""

from __future__ import annotations

import sys
from typing import Any

import torch
from support.servers.connection_options import connect_options
from support.servers.tcp import frame, raw_socket

from djinn.ir.program import NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Define, Hello, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import SocketConnection, connect
from djinn_plugins.transport.tcp.opening import open_tcp

FACTOR, COUNTER, PRODUCT, ELEMENT, SUM = 1, 2, 3, 4, 5
SHORT, LONG, ENDLESS = 1, 2, 3
STEPS_OF_LONG = 400
_NUMBERS = {SHORT: [1], LONG: [1] * STEPS_OF_LONG, ENDLESS: [[2**40]]}
_INPUTS = {SHORT: (FACTOR, COUNTER), LONG: (FACTOR, COUNTER), ENDLESS: (ELEMENT,)}
_OUTPUT = {SHORT: PRODUCT, LONG: PRODUCT, ENDLESS: SUM}


def _template(operator: Any, *arguments: Any, **keywords: Any) -> Template:
    return Template(operator.name(), facts_of(operator).digest, arguments, tuple(keywords.items()))


def products(count: int) -> Program:
    """Multiply an input by itself so many times, and count on another one, in place, how often that was."""
    templates = (_template(torch.ops.aten.mm.default, TensorArgument(), TensorArgument()),
                 _template(torch.ops.aten.add_.Scalar, TensorArgument(), NumberArgument()))
    steps = [step for _ in range(count) for step in (Step(0, (-1, -1), 1), Step(1, (-2,), 0))]
    return Program(templates, tuple(steps), 2, (count - 1,))


def endless() -> Program:
    """Add up more elements than anybody waits for, in one kernel."""
    templates = (_template(torch.ops.aten.expand.default, TensorArgument(), NumberArgument()),
                 _template(torch.ops.aten.sum.default, TensorArgument()))
    return Program(templates, (Step(0, (-1,), 1), Step(1, (0,), 1)), 1, (1,))


class Working:
    """A session of its own.

    Args:
        address: Of the server.
        token: Its token.
        side: Extent of the matrices that are multiplied.
        options: More of `ConnectOptions`.
    """

    def __init__(self, address: str, token: str = "", side: int = 700, **options: Any) -> None:
        chosen: dict[str, Any] = {"connect_timeout_s": 60, "request_timeout_s": 120, "resume": True, **options}
        self._token = token
        self.connection: SocketConnection = connect(address, connect_options(token=token, **chosen))
        counter, factor = torch.zeros((), dtype=torch.int64), torch.full((side, side), 1e-3)
        result, _ = self.connection.request(Batch([
            Upload(FACTOR, header_of(factor)), Upload(COUNTER, header_of(counter)), Upload(ELEMENT, header_of(ONE)),
            Define(SHORT, products(1)), Define(LONG, products(STEPS_OF_LONG)), Define(ENDLESS, endless())],
            synchronize=True), [factor, counter, ONE])
        assert not result.failures

    @property
    def name(self) -> str:
        return self.connection.welcome.session

    def submit(self, program: int) -> None:
        """Have a program run; nobody waits for it."""
        self.connection.submit(Batch([Run(program, _INPUTS[program], _NUMBERS[program], (_OUTPUT[program],))]), ())

    def counted(self) -> int:
        """Wait, and return how many products were computed."""
        result, data = self.connection.request(Batch(fetch=(COUNTER,)), ())
        assert len(data) == 1, result.failures
        return int(data[0])

    def cancel(self) -> None:
        """Take the session up again as a client does that was interrupted, and say so."""
        connection = self.connection
        hello = Hello(PROTOCOL_VERSION, "", "", sys.byteorder, self._token, resume=connection.welcome.resume,
                      answered=connection._end.answered, cancelled=connection._sequence)
        with connection._in_use:
            another = SocketConnection(connection.address, open_tcp(connection.address, ConnectOptions()))
            sock = raw_socket(another)
            sock.sendall(frame(hello))
            assert sock.recv(32)
            another._disconnect()

    def vanish(self) -> None:
        """Be gone without a word, as a client that was killed."""
        self.connection._again = None
        self.connection._disconnect()

    def close(self) -> None:
        self.connection.close()


ONE = torch.zeros(1)
