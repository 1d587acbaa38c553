"""``djinn.kept``: the values of a named session."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from time import monotonic, sleep
from typing import Any

import attrs
import msgspec
import torch

from djinn.errors import ConfigurationError, LimitError, RefusedError, StateLostError
from djinn.ir.value import Slot, Value
from djinn.kinds.backend_wrapper import unwrapped
from djinn.record.devices import logical_device
from djinn.record.tensor import LazyTensor, wrap
from djinn.session import runtime
from djinn.session.session import Session
from djinn.wire.tensors import dtype_named
from djinn_plugins.common.memory.tensor_bytes import check_layout
from djinn_plugins.common.operators.named_values import (
    KeptTensor,
    KeptValue,
    NamedReply,
    NamedRequest,
    NamedSession,
    named_operators,
)
from djinn_plugins.common.operators.struct_tensors import decoded
from djinn_plugins.sessions.named.structures import put_together, taken_apart

__all__ = ("KeptValues", "named_sessions", "open_session")

OPEN_TIMEOUT_S = 30.0
"""How long to wait for the end of a session whose client is gone."""
_ERRORS = {kind.code: kind for kind in (RefusedError, LimitError)}


@attrs.define(eq=False)
class _Opened:
    """A named session that is open here.

    Attributes:
        there: What earlier clients have kept and this one has not asked for.
        here: Values that were kept or asked for here: structures and tensors. The tensors stay referenced, so that all
            that use one storage are known to share it.
        storages: By the server's number of a storage: the number that tensors here have for it.
    """

    session: weakref.ref[Session]
    name: str
    note: str
    there: dict[str, KeptValue]
    here: dict[str, tuple[bytes, list[torch.Tensor]]] = attrs.field(factory=dict)
    storages: dict[int, int] = attrs.field(factory=dict)


_opened: list[_Opened] = []


class KeptValues(MutableMapping[str, Any]):
    """The values of a named session: those assigned to a name are there when another process opens the session.

    Values are tensors, and dicts, lists and tuples of tensors, numbers and text, such as a ``state_dict``. A tensor
    that is kept stays that tensor: later writes to it are kept, too. Tensors of the CPU are copied,
    and come back as such.

    Raises:
        ConfigurationError: The session has no name.
        KeyError: There is no value of that name.
        StateLostError: It was lost.
    """

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name."""
        opened = _current()
        if name not in opened.here:
            there = opened.there.get(name)
            if there is None:
                raise KeyError(f"The session {opened.name!r} keeps no value {name!r}{opened.note}.")
            if there.problem:
                raise StateLostError(f"The value {name!r} of the session {opened.name!r} is lost: {there.problem}",
                                     hint="Make it again, and assign it to the name.")
            opened.here[name] = there.structure, _taken(opened, there)
        return put_together(*opened.here[name])

    def __setitem__(self, name: str, value: Any) -> None:
        """Keep a value, in place of an earlier one of that name."""
        opened = _current()
        structure, tensors = taken_apart(value)
        device = logical_device()
        remote = [tensor.detach().to(device) for tensor in tensors]
        if not all(isinstance(tensor, LazyTensor) for tensor in remote):
            raise TypeError("Only tensors of the CPU and of the server can be kept.")
        told = torch.frombuffer(bytearray(structure), dtype=torch.uint8).to(device)
        _answered(named_operators().keep(told, remote, name))
        opened.here[name] = structure, remote
        opened.there.pop(name, None)

    def __delitem__(self, name: str) -> None:
        """Drop the value of a name; tensors that the program still uses stay."""
        opened = _current()
        if name not in opened.here and name not in opened.there:
            raise KeyError(name)
        _asked(NamedRequest(drops=name))
        opened.here.pop(name, None)
        opened.there.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        opened = _current()
        return iter([*opened.there.keys() - opened.here.keys(), *opened.here])

    def __len__(self) -> int:
        """Count the values."""
        opened = _current()
        return len(opened.there.keys() | opened.here.keys())

    def __contains__(self, name: object) -> bool:
        """Whether there is a value of that name."""
        opened = _current()
        return name in opened.here or name in opened.there

    def __repr__(self) -> str:
        """Show the names."""
        return f"djinn.kept({', '.join(map(repr, self))})" if _find() is not None else "djinn.kept()"


def open_session(session: Session, name: str, lease_s: float = 0.0, *, must_exist: bool = False) -> None:
    """Open a named session, which this session then has until it ends.

    Args:
        session: The running session.
        name: The name.
        lease_s: How long it should stay after this process; 0 for as long as the server allows.
        must_exist: Whether it is an error if there is none of that name.

    Raises:
        RefusedError, LimitError: The server refuses; the message says what to do.
    """
    deadline = monotonic() + OPEN_TIMEOUT_S
    request = NamedRequest(name, lease_s, must_exist)
    while (reply := _asked(request)).wait_s:
        if monotonic() >= deadline:
            raise RefusedError(f"The session {name!r} is still open for a process that is gone: its program runs.",
                               hint="Try again, or ask the server's operator to end it with djinn kick.")
        sleep(min(reply.wait_s, 1.0))
    note = f": the earlier session of that name has ended, {reply.note}" if reply.note else ""
    _opened[:] = [_Opened(weakref.ref(session), name, note, {kept.name: kept for kept in reply.values})]


def named_sessions() -> tuple[NamedSession, ...]:
    """List the named sessions of the server, as far as they are of the same tenant."""
    return _asked(NamedRequest()).sessions


def _find() -> _Opened | None:
    return next((opened for opened in _opened if opened.session() is runtime.current()), None)


def _current() -> _Opened:
    found = _find()
    if found is None:
        raise ConfigurationError("This session has no name, so it keeps nothing.",
                                 hint="Give it one: djinn.init(server=..., name=...).")
    return found


def _taken(opened: _Opened, kept: KeptValue) -> list[torch.Tensor]:
    """Give tensors that lie on the server numbers of this session."""
    for tensor in kept.tensors:
        check_layout(tensor.dtype, tensor.size, tensor.stride, tensor.storage_offset)
    session = runtime.current()
    numbers = [next(session.recorder.numbers) for _ in kept.tensors]
    _answered(named_operators().take(_like(), kept.name, numbers))

    unwrapped(session.backend).live_handles += len(numbers)

    def made(number: int, tensor: KeptTensor) -> torch.Tensor:
        spec = session.specs.intern(torch.Size(tensor.size), tensor.stride, tensor.storage_offset,
                                    dtype_named(tensor.dtype), session.device)
        storage = opened.storages.setdefault(tensor.storage, number)
        return wrap(spec, Value(Slot(number, storage), spec, session.recorder.released))

    return [made(number, tensor) for number, tensor in zip(numbers, kept.tensors, strict=True)]


def _asked(request: NamedRequest) -> NamedReply:
    return _answered(named_operators().session(_like(), msgspec.json.encode(request).decode()))


def _answered(answer: torch.Tensor) -> NamedReply:
    """Read an answer.

    Raises:
        ConfigurationError, RefusedError, LimitError: The server refuses.
    """
    with warnings.catch_warnings():
        # It waits by its nature, which is no fault of the program.
        warnings.filterwarnings("ignore", "This line has waited")
        reply = decoded(answer.cpu(), _decoder)
    if reply.problem:
        raise _ERRORS.get(reply.code, ConfigurationError)(reply.problem, hint=reply.hint)
    return reply


def _like() -> torch.Tensor:
    return torch.empty(0, device=logical_device())


_decoder = msgspec.msgpack.Decoder(NamedReply)
