"""A base class for the layers of a session that wrap its connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from djinn.kinds.transport import Connection

if TYPE_CHECKING:
    import torch

    from djinn.wire.messages import Batch, Result

__all__ = ("ConnectionWrapper",)


class ConnectionWrapper:
    """Passes everything on to another connection; see `djinn.kinds.transport.Connection`.

    It has the optional methods and counters of connections too. They do nothing, or count nothing, where the wrapped
    connection lacks them.

    Args:
        plain: The wrapped connection; owned by the wrapper.
    """

    def __init__(self, plain: Connection) -> None:
        self.plain = plain
        self.address = plain.address
        self.welcome = plain.welcome
        self.flush_every = plain.flush_every

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far."""
        return self.plain.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received so far."""
        return self.plain.bytes_received

    @property
    def sending_bytes(self) -> int:
        """As of the wrapped connection; see `djinn_plugins.common.kinds.transport.SupportsProgress`."""
        return int(getattr(self.plain, "sending_bytes", 0))

    @property
    def receiving_bytes(self) -> int:
        """As of the wrapped connection; see `djinn_plugins.common.kinds.transport.SupportsProgress`."""
        return int(getattr(self.plain, "receiving_bytes", 0))

    @property
    def bytes_not_sent(self) -> int:
        """Bytes of tensors that the server had already."""
        return int(getattr(self.plain, "bytes_not_sent", 0))

    @property
    def round_trips(self) -> int:
        """Answers that the connection has awaited on its own account, less requests that were answered early."""
        return int(getattr(self.plain, "round_trips", 0))

    @property
    def answered_early(self) -> int:
        """Requests that were answered before the server received them; see `djinn_plugins.executor.early_answers`."""
        return int(getattr(self.plain, "answered_early", 0))

    @property
    def reconnections(self) -> int:
        """How often the session was resumed on another connection."""
        return int(getattr(self.plain, "reconnections", 0))

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer."""
        self.plain.submit(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        return self.plain.request(batch, tensors)

    def later_values(self) -> list[Any] | None:
        """As of the wrapped connection; see `djinn_plugins.common.kinds.transport.SupportsLaterValues`."""
        later_values = getattr(self.plain, "later_values", None)
        return None if later_values is None else later_values()

    def cancel(self) -> None:
        """Cancel the submitted work, if the wrapped connection can."""
        cancel = getattr(self.plain, "cancel", None)
        if cancel is not None:
            cancel()

    def close(self) -> None:
        """End the session."""
        self.plain.close()
