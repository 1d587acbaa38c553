"""A connection that counts the bytes sent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

import torch

from djinn.errors import OutOfMemoryError
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.wire.messages import Batch, Define, Result, Run, RunDelta, Upload, UploadByDigest
from djinn_plugins.common.failures import name_of
from djinn_plugins.common.tracing.debugging import EXECUTION
from djinn_plugins.common.tracing.totals import TOTALS

__all__ = ("CountedConnection",)

_NO_MEMORY = frozenset(map(name_of, (OutOfMemoryError(""), torch.OutOfMemoryError(), MemoryError())))


class CountedConnection(ConnectionWrapper):
    """Counts messages and their commands, and measures requests; see `djinn_plugins.common.tracing.totals.Totals`."""

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer."""
        self._count(batch, "streaming")
        self.plain.submit(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        self._count(batch, "subgraph")
        begin_s = perf_counter()
        try:
            answer = self.plain.request(batch, tensors)
        except BaseException:
            TOTALS.failed_requests += 1
            raise
        finally:
            seconds = perf_counter() - begin_s
            TOTALS.requests.add(seconds)
        if answer[0].failures:
            TOTALS.memory_failures += any(failure.kind in _NO_MEMORY for failure in answer[0].failures)
        if EXECUTION.isEnabledFor(logging.DEBUG):
            EXECUTION.debug("%s answered after %.2f ms: %d values, %d failures", self.address,
                            1e3 * seconds, len(answer[0].items), len(answer[0].failures))
        return answer

    def _count(self, batch: Batch, strategy: str) -> None:
        TOTALS.batches["local" if self.address.startswith("local:") else strategy] += 1
        runs = 0
        for command in batch.commands:
            kind = type(command)
            if kind is Run or kind is RunDelta:
                runs += 1
            elif kind is Define:
                TOTALS.programs_defined += 1
            elif kind is Upload:
                TOTALS.uploads += 1
            elif kind is UploadByDigest:
                TOTALS.uploads_known += 1
        TOTALS.programs_run += runs
        if EXECUTION.isEnabledFor(logging.DEBUG):
            EXECUTION.debug("%s is sent %d commands, %d of them runs; %d values are fetched", self.address,
                            len(batch.commands), runs, len(batch.fetch))
