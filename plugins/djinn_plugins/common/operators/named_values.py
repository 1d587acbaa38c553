"""Named sessions: what clients and servers say about values that stay when a client leaves.

``djinn::named_session`` opens a session by name, and lists names. ``djinn::keep_values`` gives values a name, and
``djinn::take_values`` gives values that were kept the handles that the client has chosen. Each runs at once, and
answers with a `NamedReply`; they write to no argument, and return no view of one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import msgspec
import torch
from msgspec import Meta

from djinn_plugins.common.memory.tensor_bytes import buffer_of
from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators
from djinn_plugins.common.operators.struct_tensors import encoded
from djinn_plugins.common.settings.connection import MAX_NAME

__all__ = ("MAX_NAME", "NAMED_OPERATORS", "KeptTensor", "KeptValue", "NamedOperators", "NamedReply", "NamedRequest",
           "NamedSession", "NamedValues", "named_operators", "serving")

_SCHEMAS = {
    "named_session": "(Tensor like, str request) -> Tensor",
    "keep_values": "(Tensor structure, Tensor[] values, str name) -> Tensor",
    "take_values": "(Tensor like, str name, int[] handles) -> Tensor",
}
NAMED_OPERATORS = frozenset(f"djinn::{name}" for name in _SCHEMAS)
"""Their names."""
_Name = Annotated[str, Meta(max_length=MAX_NAME)]
_Size = Annotated[int, Meta(ge=0)]
_Sizes = Annotated[tuple[_Size, ...], Meta(max_length=64)]
_serving = threading.local()


class NamedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client asks.

    Attributes:
        name: The session that is opened; empty for a list of all.
        lease_s: How long it should stay after its client has left; 0 for as long as the server allows.
        is_known: Whether it must exist.
        drops: Name of a value of the open session that is dropped.
    """

    name: _Name = ""
    lease_s: Annotated[float, Meta(ge=0)] = 0.0
    is_known: bool = False
    drops: _Name = ""


class KeptTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that is kept.

    Attributes:
        storage: Number of its storage; tensors with the same number share it.
        dtype: Its dtype, by the name that it has in ``torch``.
        size, stride, storage_offset: As in PyTorch.
    """

    storage: _Size
    dtype: str
    size: _Sizes
    stride: _Sizes
    storage_offset: _Size


class KeptValue(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that is kept under a name.

    Attributes:
        name: Its name.
        structure: What the client has said about how it is made of tensors.
        tensors: The tensors.
        problem: Why it is lost; empty if it is not.
    """

    own_texts: ClassVar = ("name",)
    """The client's own, which stay as they are; see `djinn_plugins.common.operators.struct_tensors.decoded`."""

    name: str
    structure: bytes = b""
    tensors: tuple[KeptTensor, ...] = ()
    problem: str = ""


class NamedSession(msgspec.Struct, frozen=True, omit_defaults=True):
    """A named session, as shown in a list.

    Attributes:
        name: Its name.
        client: Address of the client that has it open; empty if none has.
        left_s: How long it will stay if no client opens it.
        values: Number of values that are kept.
        size_bytes: Bytes that it holds.
    """

    name: str
    client: str = ""
    left_s: float = 0.0
    values: int = 0
    size_bytes: int = 0


class NamedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a client.

    Attributes:
        problem, hint: Why nothing was done, and what helps.
        code: Code of the error that this is; empty for one of the configuration.
        wait_s: How long to wait before asking again, because the session is not there yet.
        lease_s: How long the session will stay after its client has left.
        note: How an earlier session of that name ended, if this one is new.
        values: The values that are kept in the session that was opened.
        sessions: All sessions.
    """

    problem: str = ""
    hint: str = ""
    code: str = ""
    wait_s: Annotated[float, Meta(ge=0)] = 0.0
    lease_s: Annotated[float, Meta(ge=0)] = 0.0
    note: str = ""
    values: tuple[KeptValue, ...] = ()
    sessions: tuple[NamedSession, ...] = ()


class NamedValues(Protocol):
    """The named sessions of a server, as one of its sessions uses them.

    Concurrency:
        The session's thread, while a program of it runs.
    """

    def answer(self, request: NamedRequest) -> NamedReply:
        """Answer a client's request. Never raises: the answer contains the problem."""

    def keep(self, name: str, structure: bytes, values: Sequence[torch.Tensor]) -> NamedReply:
        """Keep values, in place of earlier ones of that name. Never raises."""

    def take(self, name: str, handles: Sequence[int]) -> NamedReply:
        """Give the tensors of a kept value handles, in order. Never raises."""


class NamedOperators(NamedTuple):
    """The operators."""

    session: Any
    keep: Any
    take: Any


@contextmanager
def serving(values: NamedValues) -> Iterator[None]:
    """Use these values in the operators that this thread runs."""
    _serving.values = values
    try:
        yield
    finally:
        del _serving.values


@once
def named_operators() -> NamedOperators:
    """Return the operators; the first call defines them."""
    kernels = {"named_session": (_session, None), "keep_values": (_keep, None), "take_values": (_take, None)}
    return NamedOperators(*define_operators(_SCHEMAS, kernels, dict.fromkeys(_SCHEMAS, torch.Tag.dynamic_output_shape)))


def _session(like: torch.Tensor, request: str) -> torch.Tensor:
    here = _here()
    try:
        asked = _decoder.decode(request)
    except msgspec.MsgspecError as error:
        return encoded(NamedReply(f"The request is malformed: {error}."), like)
    return encoded(_NOWHERE if here is None else here.answer(asked), like)


def _keep(structure: torch.Tensor, values: list[torch.Tensor], name: str) -> torch.Tensor:
    here = _here()
    if here is None:
        return encoded(_NOWHERE, structure)
    with torch.inference_mode(mode=False), torch.no_grad():
        return encoded(here.keep(name, bytes(buffer_of(structure.cpu().contiguous())), values), structure)


def _take(like: torch.Tensor, name: str, handles: list[int]) -> torch.Tensor:
    here = _here()
    return encoded(_NOWHERE if here is None else here.take(name, handles), like)


def _here() -> NamedValues | None:
    return getattr(_serving, "values", None)


_NOWHERE = NamedReply("An executor in the program's own process keeps no named sessions.",
                      "Start a server with djinn serve, and give its address to djinn.init.")


_decoder = msgspec.json.Decoder(NamedRequest)
