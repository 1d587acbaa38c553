"""A base class for the layers of a session that wrap its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from djinn.kinds.backend import Backend, RemoteExecutor
from djinn.wire.messages import Welcome

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from djinn.ir.program import ProgramLayout
    from djinn.ir.tape import Node
    from djinn.ir.value import Slot
    from djinn.kinds.cache import SubmissionCache

__all__ = ("BackendWrapper", "unwrapped")


class BackendWrapper:
    """Passes everything on to another backend; see `djinn.kinds.backend.Backend`.

    Args:
        plain: The wrapped backend; owned by the wrapper.
    """

    def __init__(self, plain: Backend) -> None:
        self.plain = plain

    @property
    def materializations(self) -> int:
        """How often the session has fetched values."""
        return self.plain.materializations

    @materializations.setter
    def materializations(self, count: int) -> None:
        self.plain.materializations = count

    @property
    def nodes_taken(self) -> int:
        """Nodes that were taken off the tape."""
        return self.plain.nodes_taken

    @nodes_taken.setter
    def nodes_taken(self, count: int) -> None:
        self.plain.nodes_taken = count

    @property
    def address(self) -> str:
        """Where operations run."""
        return self.plain.address

    @property
    def welcome(self) -> Welcome:
        """What the first executor's server said when the session began."""
        return self.plain.welcome

    @property
    def executors(self) -> Sequence[RemoteExecutor]:
        """The executors that there are now."""
        return self.plain.executors

    @property
    def device_count(self) -> int:
        """How many logical devices it offers."""
        return self.plain.device_count

    def flush(self) -> None:
        """Send everything pending."""
        self.plain.flush()

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values."""
        return self.plain.fetch(slots, whole=whole)

    def known(self, slot: Slot) -> Any:
        """Return a value without asking any executor, for the caller to own; ``None`` if no layer knows it."""
        return self.plain.known(slot) if isinstance(self.plain, BackendWrapper) else None

    @property
    def placing(self) -> Any:
        """What lets others say which executor runs what; see `djinn_plugins.schedule.placing.SupportsPlacement`."""
        return getattr(self.plain, "placing", self.plain)

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        return self.plain.describe(slots)

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self.plain.synchronize()

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor."""
        self.plain.upload(number, dense, device)

    def seed(self, seed: int) -> None:
        """Seed the random numbers, after everything pending."""
        self.plain.seed(seed)

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a segment again that was recorded before."""
        self.plain.run(nodes, released, layout)

    def cancel(self) -> None:
        """Cancel the submitted work that has not begun."""
        self.plain.cancel()

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the caches of results, and use others."""
        self.plain.use_cache(open_cache)

    def stats(self) -> Mapping[str, int]:
        """Return the counters."""
        return self.plain.stats()

    def close(self) -> None:
        """Close the connections."""
        self.plain.close()


def unwrapped(backend: Any) -> Any:
    """Return the backend inside of all `BackendWrapper` around it."""
    while isinstance(backend, BackendWrapper):
        backend = backend.plain
    return backend
