"""Measures how long programs run on an executor, from its answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from djinn.kinds import Connection
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.wire.messages import Batch, Result


class MeteredConnection(ConnectionWrapper):
    """A connection whose server reports with each answer how long programs ran.

    Attributes:
        run_ns: How long they ran so far.
    """

    def __init__(self, plain: Connection) -> None:
        super().__init__(plain)
        self.run_ns = 0
        self._has_asked = False

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that requests no answer."""
        self.plain.submit(self._asking(batch), tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        result, data = self.plain.request(self._asking(batch), tensors)
        self.run_ns += result.run_ns
        return result, data

    def _asking(self, batch: Batch) -> Batch:
        if self._has_asked:
            return batch
        self._has_asked = True
        return msgspec.structs.replace(batch, metered=True)
