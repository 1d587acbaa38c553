"""Backends: what a session hands its tape to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import attrs
import torch

from djinn.kinds.cache import SubmissionCache
from djinn.kinds.classifier import Classifier
from djinn.kinds.layer import SharedState
from djinn.kinds.transport import Connection, Transport
from djinn.wire.messages import Welcome

if TYPE_CHECKING:
    from djinn.ir.flush_policy import AdaptiveFlush
    from djinn.ir.program import ProgramLayout
    from djinn.ir.tape import Node, Tape
    from djinn.ir.value import Slot
    from djinn.settings import Settings
    from djinn.settings.selection import PluginSelection

__all__ = ("Arrange", "Backend", "BackendContext", "BackendFactory", "OpenBackend", "RemoteExecutor")

Arrange: TypeAlias = "Callable[[Sequence[Node]], Sequence[int] | None]"
"""Gives the order of a new program's nodes; ``None`` for program order."""


class RemoteExecutor(Protocol):
    """One executor of a backend, and the connection to it."""

    @property
    def address(self) -> str:
        """Where it is."""

    @property
    def welcome(self) -> Welcome:
        """What its server said when the session began."""

    @property
    def connection(self) -> Connection:
        """The connection to it."""

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent or received any more."""

    @property
    def nodes_sent(self) -> int:
        """Operations that it was given."""

    @property
    def round_trips(self) -> int:
        """Answers that were awaited from it."""

    def wrap_connection(self, wrap: Callable[[Connection], Connection]) -> Callable[[], None]:
        """Let everything that goes to it pass through another connection; returns a function that undoes that."""

    def submit(self) -> None:
        """Send the commands that wait."""

    def synchronize(self) -> None:
        """Send everything pending to it, and wait until it has run."""


class Backend(Protocol):
    """Carries out a session's tape on its executors.

    A backend is made for a tape and for a queue of released values. It takes nodes off that tape, and frees values
    whose numbers it finds in that queue once no node needs them.

    Attributes:
        materializations: How often the session has fetched values; the session counts.
        nodes_taken: Nodes that were taken off the tape.

    Concurrency:
        The caller holds the session's lock.

    Ownership:
        A backend owns its connections.

    Laws:
        backend.results_equal, backend.tape_taken, backend.values_freed, backend.failures_raised, backend.random_equal,
        backend.executors_listed, backend.closed_is_final
    """

    materializations: int
    nodes_taken: int

    @property
    def address(self) -> str:
        """Where operations run."""

    @property
    def welcome(self) -> Welcome:
        """What the first executor's server said when the session began."""

    @property
    def executors(self) -> Sequence[RemoteExecutor]:
        """The executors that there are now."""

    @property
    def device_count(self) -> int:
        """How many logical devices it offers."""

    def flush(self) -> None:
        """Send everything pending, without waiting for results.

        Raises:
            TransportError: A connection is gone.
        """

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values.

        Args:
            slots: Which.
            whole: Whether to send the whole tape, or only what the values need.

        Returns:
            One CPU tensor or plain result for each slot, owned by the caller.

        Raises:
            TransportError: A connection is gone.
            Exception: What an operation raised that should have computed a value.
        """

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values; raises as `fetch` does."""

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run; raises as `fetch` does."""

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor, to become the value of that number.

        Args:
            number: Of the value; `djinn.wire.messages.GENERATOR_HANDLE` for the state of a device's random numbers.
            dense: The tensor. It may change once this returns.
            device: The logical device that is to hold it; ``None`` for the only one.
        """

    def seed(self, seed: int) -> None:
        """Seed the random numbers, after everything pending."""

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a segment again that was recorded before, after everything pending.

        Args:
            nodes: The segment; its slots carry the numbers of this run.
            released: Numbers of its results that the program does not refer to.
            layout: What `djinn.session.programs.lay_out` makes of them.
        """

    def cancel(self) -> None:
        """Cancel the submitted work that has not begun; see `SupportsCancellation.cancel`."""

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the caches of results, and use others.

        Raises:
            ConfigurationError: The backend supports no cache, and this is one.
        """

    def stats(self) -> Mapping[str, int]:
        """Return counters of messages, bytes and values."""

    def close(self) -> None:
        """Close the connections, also if an interrupt ends a wait; only the interrupt is raised, afterwards."""


OpenBackend: TypeAlias = "Callable[[Sequence[Connection], Tape, deque[int]], Backend]"
"""Makes a backend of open connections, for a tape and a queue of released values."""


class PluginRegistry(Protocol):
    """The session's plugins: a `djinn.plugins.Plugins`."""

    selection: PluginSelection
    settings: Settings
    disabled: dict[str, str]
    """Plugins that are switched off, with their distributions."""

    @property
    def hook(self) -> Any:
        """All plugins' implementations of hooks."""

    def all(self, kind: str) -> list[Any]:
        """Return all objects of a kind of which many are used."""

    def answers(self, hook: str, **arguments: Any) -> Mapping[str, Any]:
        """Call a hook; return what is not ``None``, by plugin."""

    def transport_for(self, scheme: str) -> Transport:
        """Choose the transport for addresses of a scheme."""

    def find_executor(self, device: str) -> Any:
        """Choose the executor for a device; see `djinn.plugins.Plugins.find_executor`."""

    def choose(self, kind: str, default: str | None = None) -> Any:
        """Choose one object of a kind; see `djinn.plugins.Plugins.choose`."""


@attrs.frozen(eq=False)
class BackendContext:
    """The parts of a session that a backend, or a wrapper of one, needs."""

    settings: Settings
    """The settings of the session; ``context.settings(MySettings)`` gives those of a plugin."""
    plugins: PluginRegistry
    device: torch.device
    """The logical device; the first, if there are several."""
    classifier: Classifier
    pace: AdaptiveFlush
    """When to hand over; to be told when that happens."""
    numbers: Iterator[int]
    """Gives numbers to values."""
    connect: Callable[[str], Connection]
    """Opens another connection to an address."""
    open_cache: Callable[[], SubmissionCache]
    """Makes a cache of results, as the settings say."""
    arrange: Arrange | None
    """Gives the order of a new program's nodes; without it, programs run in the order in which they were recorded."""
    in_order: Callable[[str, Mapping[str, Any]], Sequence[Callable[[Any], Any]]]
    """Puts the layers that a hook returned in order; see `djinn.session.layers.in_order`."""
    shared: SharedState
    """What the layers share, by type: ``context.shared(MyState)`` gives the same object to all of them."""

    def wrapped(self, connections: Sequence[Connection]) -> Sequence[Connection]:
        """Let connections pass through what plugins wrap around them, see `djinn.hookspecs.djinn_wrap_connection`."""
        for wrap in reversed(self.layers("djinn_wrap_connection")):
            connections = list(map(wrap, connections))
        return connections

    def layers(self, hook: str) -> Sequence[Callable[[Any], Any]]:
        """Return the plugins' layers, the outermost first; see `djinn.hookspecs.djinn_wrap_backend`."""
        return self.in_order(hook, self.plugins.answers(hook, context=self))


class BackendFactory(Protocol):
    """Makes backends for sessions with several executors.

    Laws:
        Those of `Backend`.
    """

    name: str

    def open(self, connections: Sequence[Connection], tape: Tape, released: deque[int],
             context: BackendContext) -> Backend:
        """Make a backend.

        Args:
            connections: One open connection for each executor; the backend owns them.
            tape: The tape that it takes nodes from.
            released: Numbers of values that the program no longer refers to.
            context: The rest.

        Raises:
            ConfigurationError: The servers do not fit together.
        """
