"""A transport within the process that keeps every law, one over TCP that does, and others that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import msgspec
import torch

from djinn.errors import ConfigurationError, TransportError
from djinn.hookspecs import hookimpl
from djinn.kinds import Connection, ConnectOptions, Transport
from djinn.plugins import Plugins
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Define, PeerHello, Result, ValueTransfer, Welcome
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.transport import Channel, Listener, PeerConnection
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.executor.service import SessionService

BROKEN: dict[str, tuple[str, set[str]]] = {
    "reverses": ("transport.batch_order", {"transport.one_reply_per_request"}),
    "repeats": ("transport.batch_order", {"transport.sessions_separate", "transport.one_reply_per_request"}),
    "contiguous": ("transport.tensors_exact", set()),
    "halves": ("transport.tensors_exact", set()),
    "old-replies": ("transport.one_reply_per_request", {
        "transport.batch_order", "transport.tensors_exact", "transport.ownership", "transport.sessions_separate",
        "transport.counters_monotonic"}),
    "keeps-failures": ("transport.one_reply_per_request", set()),
    "late": ("transport.ownership", {"transport.counters_monotonic"}),
    "one-for-all": ("transport.sessions_separate", {"transport.one_reply_per_request"}),
    "any-address": ("transport.address_checked", set()),
    "reopens": ("transport.closed_is_final", set()),
    "raw-error": ("transport.closed_is_final", set()),
    "counts-down": ("transport.counters_monotonic", set()),
    "tcp-nameless": ("transport.error_names_address", {"transport.closed_is_final"}),
    "tcp-deaf": ("transport.listener_closes", set()),
    "tcp-stops-the-loop": ("transport.awaited_handshakes", {"transport.awaits_end"}),
    "tcp-wont-be-cancelled": ("transport.awaits_end", set()),
    "tcp-uncounted": ("transport.counters_monotonic", set()),
    "tcp-flat": ("transport.transfers", set()),
    "tcp-first-only": ("transport.transfers", set()),
    "tcp-retries": ("transport.exactly_once", set()),
    "tcp-gives-up": ("transport.resumed", {"transport.exactly_once"}),
}
"""Name of each broken transport, the law that it breaks, and others that it may break as a consequence."""

_shared: list[SessionService] = []


def _without_lowest_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    made = tensor.clone()
    made.as_strided((made.numel(),), (1,)).view(torch.uint8)[::made.itemsize] = 0
    return made


class _Connection:
    def __init__(self, address: str, executor: Executor, flaw: str) -> None:
        self.address = address
        self.welcome = Welcome(PROTOCOL_VERSION, torch.__version__, "", "little", executor.device, "1")
        self.bytes_sent = self.bytes_received = 0
        self.flush_every = 64
        self._flaw = flaw
        self._executor = executor
        self._lock = threading.Lock()
        self._service = SessionService(executor)
        if flaw == "one-for-all":
            _shared.append(self._service)
            self._service = _shared[0]
        self._held: list[tuple[Batch, Sequence[torch.Tensor]]] = []
        self._last: tuple[Result, list[torch.Tensor]] | None = None
        self._failures: tuple[Any, ...] = ()
        self._closed = False

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        self._check("submit")
        defines = any(isinstance(command, Define) for command in batch.commands)
        if self._flaw == "late" or (self._flaw == "reverses" and not tensors and not defines):
            self._held.append((batch, tensors))
            return
        self._handle(batch, tensors)
        if self._flaw == "repeats" and not tensors:
            self._handle(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        self._check("request")
        held = self._held if self._flaw == "late" else self._held[::-1]
        self._held = []
        for earlier in held:
            self._handle(*earlier)
        result, data = self._handle(batch, tensors)
        self.bytes_received += 1 if self._flaw != "counts-down" else -1
        if self._flaw == "old-replies":
            (result, data), self._last = self._last or (result, data), (result, data)
        if self._flaw == "keeps-failures":
            self._failures += result.failures
            result = Result(result.items, self._failures)
        if self._flaw == "contiguous":
            data = [tensor.contiguous() for tensor in data]
        if self._flaw == "halves":
            data = list(map(_without_lowest_bytes, data))
        return result, data

    def close(self) -> None:
        self._closed = True

    def _handle(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        with self._lock:
            return self._service.handle(batch, tensors)

    def _check(self, what: str) -> None:
        if self._closed and self._flaw == "raw-error":
            raise RuntimeError(f"{what} on {self.address}, which is closed")
        if self._closed and self._flaw != "reopens":
            raise TransportError(f"The session on {self.address} is closed.")


class _InProcess:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = self.scheme = flaw

    def connect(self, address: str, options: ConnectOptions) -> _Connection:
        if options.open_executor is None or (not address.startswith(f"{self.scheme}:") and self._flaw != "any-address"):
            raise ConfigurationError(f"The address {address!r} makes no sense here.")
        return _Connection(address, options.open_executor(), self._flaw)


class _Proxy:
    """Stands before an object and changes some of its attributes."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self._inner = inner
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _nameless(action: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return action(*args)
        except TransportError as error:
            raise TransportError("The connection is gone.") from error

    return call


def _retrying(connection: Any) -> Any:
    """Send a batch again whenever the connection broke meanwhile, as if it could not have arrived."""

    def submit(batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        before = connection.reconnections
        connection.submit(batch, tensors)
        if connection.reconnections > before:
            connection.submit(batch, tensors)

    def request(batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        before = connection.reconnections
        answer: tuple[Result, list[torch.Tensor]] = connection.request(batch, tensors)
        return answer if connection.reconnections == before else connection.request(batch, tensors)

    return _Proxy(connection, submit=submit, request=request)


async def _accept_on_the_loop(listener: Any) -> Channel | None:
    return listener.accept()  # type: ignore[no-any-return]  # a `Listener`


async def _accept_uncancelled(listener: Any) -> Channel | None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(4):
        return await listener.accept_async()  # type: ignore[no-any-return]  # a `SupportsAsyncAccept`
    await anyio.lowlevel.checkpoint()
    return None


_WAITS = {"tcp-stops-the-loop": _accept_on_the_loop, "tcp-wont-be-cancelled": _accept_uncancelled}


class _OverTcp:
    resumes = True
    loopback_address = "tcp://127.0.0.1:0"

    def __init__(self, inner: Transport, flaw: str) -> None:
        self._inner = inner
        self.name = self._flaw = self.scheme = flaw

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        if self._flaw == "tcp-gives-up":
            options = attrs.evolve(options, resume=False)
        connection: Any = self._inner.connect(address, options)
        if self._flaw == "tcp-retries":
            return _retrying(connection)  # type: ignore[no-any-return]  # forwards the rest
        if self._flaw == "tcp-nameless":
            return _Proxy(connection, request=_nameless(connection.request), submit=_nameless(connection.submit))  # type: ignore[return-value]  # forwards the rest
        return _Proxy(connection, bytes_received=7) if self._flaw == "tcp-uncounted" else connection  # type: ignore[no-any-return]  # as above

    def connect_peer(self, address: str, peer: PeerHello, options: ConnectOptions) -> PeerConnection:
        carrier: Any = self._inner.connect_peer(address, peer, options)  # type: ignore[attr-defined]  # of a carrying one

        def flat(transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
            carrier.send(msgspec.structs.replace(transfer, layout=None), tensors)

        def first_only(transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
            if transfer.transfer != 12:
                carrier.send(transfer, tensors)

        sends = {"tcp-flat": flat, "tcp-first-only": first_only}
        return _Proxy(carrier, send=sends[self._flaw]) if self._flaw in sends else carrier  # type: ignore[no-any-return,return-value]  # forwards the rest

    def listen(self, address: str, options: ListenOptions) -> Listener:
        listener = self._inner.listen(address, options)
        if self._flaw in _WAITS:
            return _Proxy(listener, accept_async=partial(_WAITS[self._flaw], listener))  # type: ignore[return-value]  # forwards the rest
        if self._flaw != "tcp-deaf":
            return listener
        gate = threading.Event()

        def accept() -> Channel | None:
            accepted = listener.accept()
            if accepted is None:
                gate.wait(8)
            return accepted

        return _Proxy(listener, accept=accept)  # type: ignore[return-value]  # forwards the rest


@hookimpl
def djinn_register_transports(register: Any) -> None:
    tcp = Plugins.load(names=["djinn-transport-tcp"]).transport_for("tcp")
    for name in ("healthy", "tcp-healthy", *BROKEN):
        register(_OverTcp(tcp, name) if name.startswith("tcp-") else _InProcess(name))


