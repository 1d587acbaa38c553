"""The sending end of a connection that carries values from server to server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import PeerHello, ValueTransfer
from djinn_plugins.transport.tcp.connection import SocketConnection
from djinn_plugins.transport.tcp.sockets import ByteStream
from djinn_plugins.transport.tcp.stream import FrameStream, views_of

__all__ = ("SocketCarrier", "adopt_peer", "connect_peer")


def connect_peer(
    address: str, peer: PeerHello, options: ConnectOptions, opened: Callable[[str, ConnectOptions], FrameStream]
) -> SocketCarrier:
    """Connect to another server and greet it; see `djinn_plugins.common.kinds.transport.SupportsPeers.connect_peer`."""
    deadline = monotonic() + options.connect_timeout_s
    carrier = SocketCarrier(address, opened(address, options))
    carrier.introduce(peer, deadline)
    carrier.wait_while_wanted(options.is_gone)
    return carrier


def adopt_peer(descriptor: int, received: bytes, address: str, options: ConnectOptions) -> SocketCarrier:
    """Send on another process's connection; see `djinn_plugins.common.kinds.transport.SupportsPeerRelay.adopt_peer`."""
    carrier = SocketCarrier(address, FrameStream(ByteStream(socket.socket(fileno=descriptor), received=received)))
    carrier.wait_while_wanted(options.is_gone)
    return carrier


class SocketCarrier(SocketConnection):
    """Carries transfers; see `djinn_plugins.common.kinds.transport.PeerConnection`.

    `send` blocks only while more than `MAX_QUEUED_BYTES` would be queued.
    """

    def wait_while_wanted(self, is_gone: Callable[[], bool] | None) -> None:
        """End stalled transfers when they are no longer needed."""
        self._frames.stream.is_unwanted = is_gone

    def detach(self) -> tuple[int, bytes]:
        """Give the connection away; see `djinn_plugins.common.kinds.transport.MovablePeerConnection.detach`."""
        try:
            return self._frames.stream.detach()
        except OSError as error:
            raise self._ended(error) from None
        finally:
            self._lost = self._lost or "it was given away"

    def send(self, transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
        """Send a transfer with its tensor; see `djinn_plugins.common.kinds.transport.PeerConnection.send`."""
        if self._lost:
            raise self._closed()
        views = views_of(self._sequence + 1, transfer, tensors)
        try:
            self._sequence += 1
            self._outbox.send(views, waits=False)
        except BaseException as error:  # noqa: BLE001  # for any error, close the connection and release it
            raise self._ended(error) from None

    def close(self, drain_s: float = 0.0) -> None:
        """End the connection; see `djinn_plugins.common.kinds.transport.PeerConnection.close`."""
        if drain_s and not self._lost:
            self._outbox.drain(drain_s)
        super().close()
