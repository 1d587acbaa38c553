"""The process-wide state: the installed interceptor and the running session."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from djinn.errors import UnsupportedTensorError
from djinn.kinds import Connection, Interceptor
from djinn.record import devices
from djinn.record.dispatcher import dispatcher
from djinn.session.connecting import connect_first

if TYPE_CHECKING:
    from djinn.session.session import Session

log = logging.getLogger("djinn.runtime")

_lock = threading.RLock()
_session: Session | None = None
_process: int | None = None
"""The process that started the session; ``None`` before the first."""
_seed: int | None = None
_init_hooks: list[Callable[[], None]] = []
_init_time_ms = 0.0


def install(interceptor: Interceptor) -> None:
    """Make PyTorch hand its operations to djinn. Opens nothing and starts nothing."""
    devices.use_device(interceptor.install)
    dispatcher.functions = interceptor.functions()


def init(server: str | None = None, **settings: Any) -> Session:
    """Start a session; a running session is ended first.

    Args:
        server: ``tcp://host:port``, ``tls://host:port`` or ``unix:///path``; without it, and without ``DJINN_SERVER``,
            operations run in this process.
        **settings: Settings of the kernel, `djinn.settings.Config`, and of plugins; ``djinn settings`` lists all.

    Raises:
        ConfigurationError: A setting is unknown or has an invalid value.
        PluginError: A plugin is missing, broken or ambiguous.
        TransportError: The server cannot be reached, or refuses the connection.
    """
    with _lock:
        return _start({**settings, "server": server})


def _start(given: Mapping[str, Any]) -> Session:
    global _session, _process, _init_time_ms
    from djinn.plugins.manager import Plugins
    from djinn.session.session import Session
    from djinn.settings import Config
    from djinn.settings.logs import configure

    if torch.utils.data.get_worker_info() is not None:
        # PyTorch would collate the tensors into shared memory on their device, which would end the worker.
        raise UnsupportedTensorError("Workers of a DataLoader cannot use remote tensors.",
                                     hint="Let them make ordinary tensors, and move each batch with .to(device).")
    plugins = Plugins.configured(given, os.environ)
    plugins.hook.djinn_check_settings(settings=plugins.settings)
    shutdown()
    begin = perf_counter()
    configure(config := plugins.settings(Config))
    connections: list[Connection] = []
    try:
        connections.extend(connect_first(plugins, address) for address in config.addresses)
        session = Session(plugins, connections, devices.logical_device())
        operators = plugins.choose("interceptor", "device").handlers(session)
        session.seed(next_seed())
    except BaseException:
        for connection in connections:
            connection.close()
        raise
    if _process is None:
        atexit.register(shutdown)
    _session, _process = session, os.getpid()
    dispatcher.begin(session.recorder.dispatch, operators)
    _init_time_ms = (perf_counter() - begin) * 1000
    try:
        plugins.hook.djinn_session_started(session=session)
        for hook in _init_hooks:
            hook()
    except BaseException:
        shutdown()
        raise
    return session


def current() -> Session:
    """Return the running session; start one with the settings of the environment if there is none."""
    session = _session
    if session is not None and _process == os.getpid():
        return session
    with _lock:
        if _session is not None and _process == os.getpid():
            return _session
        return _start({})


def shutdown() -> None:
    """End the session, if there is one. Its lazy tensors become unusable, and its remote values are freed."""
    global _session
    with _lock:
        session = _session
        dispatcher.end()
        try:
            if session is not None and _process == os.getpid():
                session.close()
        finally:
            # An interrupt may arrive before it begins to close.
            if session is None or session.closed or _process != os.getpid():
                _session = None


def forget_in_child() -> None:
    """Drop the parent's session in a forked child, which starts its own if it needs one."""
    global _session, _lock
    _session = None
    _lock = threading.RLock()
    dispatcher.end()


def is_initialized() -> bool:
    """Whether a session is running."""
    return _session is not None


ensure_initialized = current


def register_init_hook(hook: Callable[[], None]) -> None:
    """Call ``hook`` after every start of a session; at once if one is running."""
    _init_hooks.append(hook)
    if _session is not None:
        hook()


def next_seed() -> int:
    """Return the seed that a session would start with now."""
    return torch.initial_seed() if _seed is None else _seed


def seed_all(seed: int) -> None:
    """Seed the remote random generators; later sessions start with the same seed."""
    global _seed
    _seed = seed
    if _session is not None:
        _session.seed(seed)


devices.use_sessions(current, lambda: _session)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_in_child)
