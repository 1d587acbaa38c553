"""Lists a server in its cluster's directory: the output of metrics ``directory``."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import attrs
import msgspec
from anyio.abc import ByteStream
from anyio.from_thread import start_blocking_portal
from anyio.streams.buffered import BufferedByteReceiveStream

from djinn.errors import ConfigurationError, DjinnError
from djinn_plugins.cluster.asking import IN_FILE, DirectoryAddress, parse, reachable, trusting
from djinn_plugins.cluster.messages import (
    MAX_LINE_BYTES,
    MAX_MODELS,
    MAX_NAMED,
    Accepted,
    DirectoryProblem,
    Draining,
    DrainOrder,
    Join,
    LoadReport,
    RenameOrder,
    decoded,
    encoded,
)
from djinn_plugins.common.files.secret_files import key_in
from djinn_plugins.common.settings.connection import client_authorities
from djinn_plugins.server.kinds.metrics import MetricsOutput, MetricsSource
from djinn_plugins.server.options import DirectoryOptions, ServeOptions

__all__ = ("Announcement", "Announcements")

EVERY_S = 1.0
TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two tries to join. A directory that was started again waits for longer before it says that no server has a
named session; see `djinn_plugins.cluster.directory.naming`."""
_log = logging.getLogger("djinn.server")


class Announcement(MetricsOutput):
    """Keeps a connection to a directory, reports the server's load every second, and drains the server when asked to.

    If the directory is gone, it tries to join again until it is back.

    Args:
        directory: The address of the directory.
        key: The secret that it knows servers by.
        announced: The address that clients are given; empty for the server's own.
        authorities: File with the authorities that are trusted; empty for the system's.
        limit_bytes: Memory limit of the server; 0 if there is none.
        source: What the server counts.

    Concurrency:
        `start` and `stop` are called by one thread; the task runs in another one.
    """

    def __init__(self, directory: str, key: str, announced: str, authorities: str, limit_bytes: int,
                 source: MetricsSource) -> None:
        self._directory = directory
        self._key = key
        self._announced = announced
        self._authorities = authorities
        self._limit_bytes = limit_bytes
        self._source = source
        self._running = ExitStack()

    def start(self) -> None:
        """Begin to announce the server."""
        portal = self._running.enter_context(start_blocking_portal(name="djinn-directory"))
        self._running.callback(portal.call, portal.stop, True)
        portal.start_task_soon(self._run)

    def stop(self) -> None:
        """Leave the directory, which then names the server to no client."""
        self._running.close()

    def export(self) -> None:
        """Make a report, as for the directory."""
        encoded(self._report())

    def _report(self) -> LoadReport:
        totals = self._source.totals().values()
        amounts = [found.amounts for found in totals]
        named = [each for found in totals for each in found.named][:MAX_NAMED]
        models = [model for model in self._source.models() if not model.problem][:MAX_MODELS]
        return LoadReport(
            self._source.why_not_ready()[:1000], min(2**62, sum(each.sessions for each in amounts)),
            min(2**62, sum(each.held_bytes for each in amounts)), self._limit_bytes,
            tuple(text[:256] for model in models for text in (model.name, model.digest)), self._metrics(),
            tuple(digest for digest, _ in named), tuple(began_s for _, began_s in named))

    def _metrics(self) -> str:
        """Return the URL of the server's metrics, by a host that others can connect to."""
        for page in self._source.pages():
            parts = urlsplit(page)
            return str(DirectoryAddress(parts.scheme, reachable(parts.hostname or ""), parts.port or 0))
        return ""

    async def _run(self) -> None:
        pause_s, said = FIRST_PAUSE_S, ""
        while True:
            try:
                await self._announce()
            except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead,
                    anyio.DelimiterNotFound, msgspec.DecodeError, ConfigurationError) as error:
                why = getattr(error, "summary", "") or str(error) or type(error).__name__
                if why != said:
                    _log.warning("not listed in the directory %s: %s", self._directory, why)
                pause_s = FIRST_PAUSE_S if not said else min(2 * pause_s, LONGEST_PAUSE_S)
                said = why
            await anyio.sleep(pause_s)

    async def _announce(self) -> None:
        # A directory that was started again may have written another address into its file.
        directory = parse(self._directory)
        context = trusting(self._authorities) if directory.scheme == "tls" else None
        with anyio.fail_after(TIMEOUT_S):
            stream: ByteStream = await (
                anyio.connect_tcp(directory.host, directory.port) if context is None
                else anyio.connect_tcp(directory.host, directory.port, ssl_context=context,
                                       tls_standard_compatible=False))
        async with stream:
            lines = BufferedByteReceiveStream(stream)
            with anyio.fail_after(TIMEOUT_S):
                await stream.send(encoded(Join(self._key, directory.name, self._address())))
                answer = decoded(await lines.receive_until(b"\n", MAX_LINE_BYTES))
            if isinstance(answer, DirectoryProblem):
                raise ConfigurationError(answer.summary)
            if not isinstance(answer, Accepted):
                raise ConfigurationError("it is no directory")
            _log.info("listed in the directory %s as %s", directory, self._address())
            while True:
                # The store may have to read files, and the counters of many tenants take time.
                report = await anyio.to_thread.run_sync(self._report)
                with anyio.fail_after(TIMEOUT_S):
                    await stream.send(encoded(report))
                until_s = anyio.current_time() + EVERY_S
                while (order := await _next_order(lines, until_s)) is not None:
                    done = await self._obeyed(order)
                    if done is not None:
                        with anyio.fail_after(TIMEOUT_S):
                            await stream.send(encoded(done))

    async def _obeyed(self, order: object) -> Draining | DirectoryProblem | None:
        """Drain the server, or rename a session, and return the answer to the directory, if it expects one."""
        if isinstance(order, RenameOrder):
            asked = {"named": order.named, "holder": order.holder}
            try:
                await anyio.to_thread.run_sync(self._source.operate, "rename", asked, abandon_on_cancel=True)
            except DjinnError as error:
                _log.warning("a session keeps its name, and %s has a later one: %s", order.holder, error.summary)
            return None
        if not isinstance(order, DrainOrder):
            raise ConfigurationError("it sends what no directory sends")
        _log.info("the directory %s asks this server to drain", self._directory)
        try:
            await anyio.to_thread.run_sync(self._source.operate, "drain", {}, abandon_on_cancel=True)
        except DjinnError as error:
            return DirectoryProblem(error.code, error.summary[:4000], error.hint[:4000])
        return Draining()

    def _address(self) -> str:
        """Return the address that clients are given; a server that listens on all addresses is known by its name."""
        if self._announced:
            return self._announced
        found = self._source.address
        if found.startswith("unix:"):
            return found
        own = parse(found)
        return str(attrs.evolve(own, host=reachable(own.host)))


async def _next_order(lines: BufferedByteReceiveStream, until_s: float) -> object | None:
    """Wait for an order of the directory until a time of the event loop; return ``None`` if there is none."""
    with anyio.move_on_after(until_s - anyio.current_time()):
        return decoded(await lines.receive_until(b"\n", MAX_LINE_BYTES))
    return None


class Announcements:
    """The output ``directory``; see `djinn_plugins.server.kinds.metrics.MetricsFactory`."""

    name = "directory"

    def open(self, options: ServeOptions, source: MetricsSource) -> MetricsOutput | None:
        """Open the output, if ``--directory`` is given."""
        given = options.directory
        if not given.address:
            return None
        if not given.key:
            raise ConfigurationError("--directory needs --directory-key.",
                                     hint="Give the file that `djinn directory --key` has made.")
        # It is a setting of clients, such as this server is one of the directory.
        authorities = client_authorities()
        if not given.address.startswith(IN_FILE) and parse(given.address).scheme == "tls":
            trusting(authorities)
        return Announcement(given.address, key_in(Path(given.key)), given.announced, authorities,
                            options.limits.memory_bytes, source)

    def sample(self, folder: Path) -> ServeOptions:
        """Return options with a directory that does not answer.

        See `djinn_plugins.server.kinds.metrics.SamplingMetricsFactory`.
        """
        key_in(folder / "key", makes=True)
        return ServeOptions(directory=DirectoryOptions("tcp://127.0.0.1:9/sample", str(folder / "key")))
