"""Transports carry batches to an executor, and answers back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from djinn.settings.resolved import Settings
from djinn.wire.messages import Batch, Result, Welcome

PINNED_NAME = "worker.djinn.invalid"
"""The name in pinned certificates. It is never resolved: a client trusts exactly one certificate."""


@attrs.frozen
class ConnectOptions:
    """Options for a transport's `connect`."""

    token: str = ""
    connect_timeout_s: float = 10.0
    request_timeout_s: float | None = None
    """How long an answer may make no progress; ``None``: no limit while the server is alive."""
    retries: bool = False
    """Whether to try again, within ``connect_timeout_s``, when a server that is full says when to come back."""
    settings: Settings = attrs.field(factory=Settings)
    """All settings of the session."""
    tls_pin: str = ""
    """The certificate, as PEM, that the server must present for `PINNED_NAME`, regardless of the trusted authorities;
    empty for any certificate that they have signed.
    """
    open_executor: Callable[[], Any] | None = None
    """Opens an executor in this process, for transports without a server."""
    is_gone: Callable[[], bool] | None = None
    """Whether a `PeerConnection` is no longer needed; checked while a transfer makes no progress."""


class Connection(Protocol):
    """The client's end of a session.

    Concurrency:
        One thread at a time; the session ensures that.

    Laws:
        transport.batch_order, transport.tensors_exact, transport.one_reply_per_request, transport.ownership,
        transport.sessions_separate, transport.closed_is_final, transport.counters_monotonic
    """

    address: str
    welcome: Welcome
    flush_every: int
    """Pending operations that are worth sending before a value is requested: few if the other side can work
    meanwhile.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far; 0 if nothing is transmitted."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far; 0 if nothing is transmitted."""

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that requests no answer.

        Args:
            batch: The commands.
            tensors: One dense CPU tensor per upload, in order. They may change once this returns.

        Raises:
            TransportError: The connection is lost; the error names the address.
        """

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer.

        Returns:
            The answer, and one CPU tensor per `TensorHeader` in it, owned by the caller.

        Raises:
            TransportError: The connection is lost, or no answer arrived in time; the error names the address.
        """

    def close(self) -> None:
        """End the session. Never raises; may be called twice."""


@runtime_checkable
class SupportsCancellation(Connection, Protocol):
    """Optional method of a `Connection` that cancels the batches sent so far.

    Where interrupts are deferred (see `djinn_plugins.common.interrupts`), an interrupt ends the waiting in `submit` and
    `request`. The batch then counts as sent.
    """

    def cancel(self) -> None:
        """Cancel the programs sent so far: none of them begins, and a running one ends after its current step.

        Returns soon, even if the running step takes long. All other commands are executed. Values that are not computed
        have a failure of the kind `djinn.errors.OperationCancelledError`.
        """


class Transport(Protocol):
    """One way to reach an executor."""

    name: str
    """Name in the configuration."""
    scheme: str
    """Scheme of its addresses, for example ``tcp`` in ``tcp://host:port``."""

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        """Connect and greet.

        Raises:
            TransportError: There is no answer at that address.
            RefusedError, ProtocolVersionError: The server refuses.
            ConfigurationError: The address is invalid.

        Laws:
            transport.error_names_address, transport.address_checked
        """
