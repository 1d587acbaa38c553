"""The outputs of a server's metrics, which plugins provide."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from djinn.errors import ConfigurationError, DjinnError, PluginError, RefusedError
from djinn_plugins.common.operators.stored_models import StoredModel
from djinn_plugins.server.kinds.metrics import Counts, MetricsFactory, MetricsOutput, TenantTotals
from djinn_plugins.server.metrics_store import MetricsStore
from djinn_plugins.server.options import ServeOptions

__all__ = ("Outputs", "ServerMetrics")

_log = logging.getLogger("djinn.server")


def _no_tenants(token: str) -> NoReturn:
    raise RefusedError("This server has no tenants.")


def _no_operator(command: str, arguments: Mapping[str, Any]) -> NoReturn:
    raise ConfigurationError("The server has no operator's socket.", hint="Give it one with --control.")


@attrs.frozen
class ServerMetrics:
    """The statistics of a server; see `djinn_plugins.server.kinds.metrics.MetricsSource`."""

    version: str
    store: MetricsStore
    why_not_ready: Callable[[], str]
    address: str = ""
    models: Callable[[], Sequence[StoredModel]] = tuple
    tenant_of: Callable[[str], str] = _no_tenants
    operate: Callable[[str, Mapping[str, Any]], Any] = _no_operator
    pages: Callable[[], Sequence[str]] = tuple

    def totals(self) -> dict[str, TenantTotals]:
        """Return the statistics by label."""
        return self.store.totals()

    def gateway(self) -> Counts:
        """Return the counters of connections whose tenant is not known."""
        return self.store.gateway.counts()


class Outputs:
    """Starts and stops the outputs.

    Args:
        factories: Open the outputs.
        options: The server's options.
        source: What they show or write.

    Raises:
        DjinnError: An output cannot be opened.

    Attributes:
        addresses: Where metrics can be read.

    Concurrency:
        One thread.
    """

    def __init__(self, factories: Iterable[MetricsFactory], options: ServeOptions, source: ServerMetrics) -> None:
        self._opened: list[tuple[str, MetricsOutput]] = []
        for factory in factories:
            try:
                output = factory.open(options, source)
                if output is not None:
                    output.start()
                    self._opened.append((factory.name, output))
            except DjinnError:
                self.stop()
                raise
            except Exception as error:
                self.stop()
                raise PluginError(f"The output of metrics {factory.name!r} cannot be opened: {type(error).__name__}: "
                                  f"{error}.", hint="Correct it, or choose another with DJINN_PLUGINS=metrics=NAME."
                                  ) from error
        self.addresses = [output.address for _, output in self._opened if output.address]

    def stop(self) -> None:
        """Stop all outputs. Never raises."""
        for name, output in self._opened:
            try:
                output.stop()
            except Exception:  # noqa: BLE001  # logged in full; the server stops all the same
                _log.exception("the output of metrics %r could not be stopped", name)
        self._opened.clear()
