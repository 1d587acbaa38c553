"""Records a program in a session, encodes it, and runs the decoded program on a separate executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.kinds import Connection
from djinn.record.tensor import LazyTensor
from djinn.session.connecting import connect
from djinn.session.programs import lay_out, program_of
from djinn.session.session import Session
from djinn.wire import messages
from djinn.wire.messages import Batch, Define, Poisoned, Run, Seed, TensorHeader, Upload, from_wire, to_wire
from djinn.wire.tensors import header_of
from djinn_conformance.assertions import expect_equal, violated
from djinn_conformance.oracle import perform
from djinn_conformance.programs import Recording
from djinn_plugins.common.calls.program_check import check_program

__all__ = ("Written", "expect_freed", "replayed", "written_down")

_PROGRAM = 1


@attrs.frozen
class Written:
    """A recorded program in wire format.

    Attributes:
        data: A batch that uploads the inputs, defines the program, runs it and fetches its results.
        tensors: The uploads.
        handles: By index of the recording, the handles of the values that still exist.
        fetched: The handles that the batch fetches.
    """

    data: bytes
    tensors: tuple[torch.Tensor, ...]
    handles: dict[int, int]
    fetched: tuple[int, ...]


def written_down(recording: Recording, session: Session) -> Written:
    """Record a program in a session, and encode what the session would send."""
    nodes: list[Node] = []
    uploads: dict[int, torch.Tensor] = {}
    alive: list[Any] = []
    values: dict[int, Any] = {}
    for index, tensor in enumerate(recording.inputs):
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.as_strided((length,), (1,), 0)
        sent = whole.to(session.device, copy=True)
        uploads[_handle(sent)] = whole.clone()
        alive.append(sent)
        values[-1 - index] = sent
    stop = session.capture(nodes.append)
    try:
        for index, tensor in enumerate(recording.inputs):
            values[-1 - index] = values[-1 - index].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        with torch.no_grad():
            produced = 0
            for made in recording.calls:
                for result in perform(made, values, session.device):
                    values[produced] = result
                    produced += 1
    finally:
        stop()
    return _encoded(nodes, uploads, {index: _handle(value) for index, value in values.items()
                                     if isinstance(value, LazyTensor)})


def _handle(tensor: Any) -> int:
    value: Slot = tensor._value.slot
    return value.number


def _encoded(nodes: Sequence[Node], uploads: dict[int, torch.Tensor], handles: dict[int, int]) -> Written:
    layout = lay_out(nodes, set())
    program = program_of(nodes, layout)
    check_program(program)
    run = Run(_PROGRAM, layout.inputs, to_wire(layout.numbers), layout.outputs)
    fetched = tuple(dict.fromkeys(handles.values()))
    batch = Batch([Seed(0), *(Upload(handle, header_of(tensor)) for handle, tensor in uploads.items()),
                   Define(_PROGRAM, program), run], fetch=fetched)
    return Written(messages.encode(batch), tuple(uploads.values()), handles, fetched)


def replayed(written: Written, session: Session, times: int, where: str) -> list[dict[int, Any]]:
    """Decode a program and run it several times over another connection like the session's.

    Returns:
        For each run, the values by index of the recording.
    """
    batch = messages.decode(written.data)
    assert isinstance(batch, Batch), batch
    expect_equal(messages.encode(batch), written.data, "what is encoded again", where)
    connection = connect(session.plugins, session.config.addresses[0])
    # A program that is defined anew is a new one; only one that comes again is known, and compiled.
    again = Batch([command for command in batch.commands if not isinstance(command, Define)], fetch=batch.fetch)
    try:
        return [_run(connection, batch if not number else again, written, where) for number in range(times)]
    finally:
        connection.close()


def _run(connection: Connection, batch: Batch, written: Written, where: str) -> dict[int, Any]:
    result, tensors = connection.request(batch, [tensor.clone() for tensor in written.tensors])
    if result.failures:
        violated("replay", got=result.failures[0].message, wanted="no failure", where=where)
    data = iter(tensors)
    values = [next(data) if isinstance(item, TensorHeader) else from_wire(getattr(item, "value", None))
              for item in result.items]
    by_handle = dict(zip(written.fetched, values, strict=True))
    return {index: by_handle[handle] for index, handle in written.handles.items()}


def expect_freed(session: Session, handles: Sequence[int], where: str) -> None:
    """Check that the executor no longer has any of these values."""
    __tracebackhide__ = True
    with session.lock:
        connection = session.backend.executors[0].connection
        result, _ = connection.request(Batch([], describe=tuple(handles), synchronize=True), [])
    kept = [handle for handle, item in zip(handles, result.items, strict=True) if not isinstance(item, Poisoned)]
    expect_equal(kept, [], "handles that the executor still has", where)
