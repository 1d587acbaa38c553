"""Measures how long programs run on an executor, from its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from djinn.kinds import Connection
from djinn.wire.messages import Batch, Result


class MeteredConnection:
    """A connection that requests the run time of programs with each answer, and otherwise forwards to a connection.

    Attributes:
        run_ns: How long programs have run so far.
    """

    def __init__(self, plain: Connection) -> None:
        self.run_ns = 0
        self._plain = plain
        self._has_asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that requests no answer."""
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
