"""The output of metrics ``dashboard``."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from anyio.abc import SocketListener
from anyio.from_thread import start_blocking_portal

from djinn.errors import ConfigurationError, TransportError
from djinn_plugins.common.files.secret_files import key_in
from djinn_plugins.common.net.encryption import server_context
from djinn_plugins.common.net.exposure import check_exposure
from djinn_plugins.common.net.urls import url_of
from djinn_plugins.server.kinds.metrics import MetricsOutput, MetricsSource, PeriodicOutput
from djinn_plugins.server.options import DashboardOptions, ServeOptions
from djinn_plugins.watch.dashboard.model import EVERY_S, ServerModel, open_tenant

__all__ = ("DashboardOutput", "Dashboards")

_log = logging.getLogger("djinn.server")


def default_key() -> Path:
    """Return the file of the operator's key, if no other one is given."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "djinn" / "dashboard.key"


class DashboardOutput(PeriodicOutput):
    """Serves the page, and takes samples for its charts.

    Args:
        options: The server's options.
        source: What the server counts.

    Raises:
        ConfigurationError: The page would be exposed, or a file or library that it needs is missing.
        TransportError: The address cannot be listened on.

    Concurrency:
        `start` and `stop` are called by one thread; everything else runs in threads of the output.
    """

    def __init__(self, options: ServeOptions, source: MetricsSource) -> None:
        super().__init__(EVERY_S)
        try:
            from djinn_plugins.common.dashboard.endpoint import DashboardEndpoint
        except ImportError:
            raise ConfigurationError(
                "--dashboard-port needs the package h11, which is not installed.",
                hint="Install it with: python3 -m pip install 'djinn-torch[dashboard]'") from None
        host, port = options.dashboard.host, options.dashboard.port or 0
        check_exposure(host, is_encrypted=bool(options.tls.cert), needs_token=open_tenant(source) is None)
        key_file = Path(options.dashboard.key) if options.dashboard.key else default_key()
        self._model = ServerModel(source, key_in(key_file, makes=True))
        context = server_context(options.tls.cert, options.tls.key) if options.tls.cert else None
        try:
            family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                         flags=socket.AI_PASSIVE)[0]
            self._socket = socket.create_server(target, family=family)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"The dashboard cannot be served on {host!r}, port {port}: {error}.",
                                 hint="Choose a free port with --dashboard-port (0 finds one), and an address of this "
                                      "machine with --dashboard-host.") from None
        self.page = f"{url_of('https' if context else 'http', host, self._socket.getsockname()[1])}/"
        self._key_file = key_file
        self._endpoint = DashboardEndpoint(self._model, host, context)
        self._running = ExitStack()

    def start(self) -> None:
        """Start serving."""
        portal = self._running.enter_context(start_blocking_portal(name="djinn-dashboard"))
        self._running.callback(portal.call, portal.stop, True)
        portal.start_task_soon(self._serve)
        super().start()
        _log.info("dashboard on %s, the operator's key is in %s", self.page, self._key_file)

    def stop(self) -> None:
        """Stop serving."""
        self._running.close()
        self._socket.close()
        super().stop()

    def export(self) -> None:
        """Take a sample."""
        self._model.sample()

    async def _serve(self) -> None:
        await self._endpoint.run(await SocketListener.from_socket(self._socket))


class Dashboards:
    """The output ``dashboard``; see `djinn_plugins.server.kinds.metrics.MetricsFactory`."""

    name = "dashboard"

    def open(self, options: ServeOptions, source: MetricsSource) -> MetricsOutput | None:
        """Open the page, if there is a port for it."""
        return None if options.dashboard.port is None else DashboardOutput(options, source)

    def sample(self, folder: Path) -> ServeOptions:
        """Return options with a free port; see `djinn_plugins.server.kinds.metrics.SamplingMetricsFactory`."""
        return ServeOptions(dashboard=DashboardOptions(port=0, key=str(folder / "key")))
