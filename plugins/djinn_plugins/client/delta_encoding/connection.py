"""A connection that delta-encodes repeated runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from djinn.kinds import Connection
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.wire.messages import Batch, Command, Forget, Result, Run
from djinn_plugins.common.wire.delta import RunPredictor


class DeltaConnection(ConnectionWrapper):
    """Sends the differences of each run from the run that both sides predict; see `djinn_plugins.common.wire.delta`."""

    def __init__(self, plain: Connection) -> None:
        super().__init__(plain)
        self._forecast = RunPredictor()

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer."""
        self.plain.submit(self._encoded(batch), tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        return self.plain.request(self._encoded(batch), tensors)

    def _encoded(self, batch: Batch) -> Batch:
        if not batch.commands:
            return batch
        return msgspec.structs.replace(batch, commands=list(map(self._command, batch.commands)))

    def _command(self, command: Command) -> Command:
        if isinstance(command, Run):
            return self._forecast.shorten(command)
        if isinstance(command, Forget):
            self._forecast.forget(command.programs)
        return command
