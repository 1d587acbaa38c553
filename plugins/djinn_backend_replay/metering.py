"""How long programs run at an executor, as far as its answers tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from djinn.kinds import Connection
from djinn.wire.messages import Batch, Result


class MeteredConnection:
    """A connection whose server tells with each answer how long programs ran. All else goes straight to the connection.

    Attributes:
        run_ns: How long they ran so far.
    """

    def __init__(self, plain: Connection) -> None:
        self.run_ns = 0
        self._plain = plain
        self._has_asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer."""
        self._plain.submit(self._asking(batch), tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        result, data = self._plain.request(self._asking(batch), tensors)
        self.run_ns += result.run_ns
        return result, data

    def _asking(self, batch: Batch) -> Batch:
        if self._has_asked:
            return batch
        self._has_asked = True
        return msgspec.structs.replace(batch, metered=True)
