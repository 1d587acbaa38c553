"""The hooks of djinn, by phase.

A plugin is a module, found through an entry point of the group ``djinn``, whose functions carry `hookimpl`::

    from djinn.hookspecs import hookimpl

    @hookimpl
    def djinn_register_schedulers(register):
        from my_package.scheduler import MyScheduler
        register(MyScheduler())

Hooks run when a session is composed, begins or ends, when it is calibrated, and when the command line is built; never
per operation.

Each kind of plugin has a hook that registers its objects, such as ``djinn_register_schedulers``. These hooks have the
following in common, and their docstrings say only what differs:

- They belong to phase *register*. djinn calls them when a session, a server or a command first needs an object of the
  kind. All implementations run; order is irrelevant.
- ``register`` accepts one object, and may be called once for each of several. It raises `PluginValidationError` if the
  object lacks a member of its Protocol, or if the same plugin has already registered an object of that kind and name.
- Registering announces an object and must stay cheap: it opens no device, starts no thread, connects to nothing and
  sends nothing. A factory opens its object later, for a session or a server that uses it.
- The laws of the objects are in ``specs/kinds/KIND.toml``.
- They exist since 0.1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

if TYPE_CHECKING:
    import typer

    from djinn import kinds
    from djinn.settings import Declarations, Settings

    Session: TypeAlias = Any
    """A `djinn.session.session.Session`; contracts import nothing that is built on them."""
    RegisterOfLibrary: TypeAlias = Callable[[Any], None]
    """For contracts that libraries define; the kernel imports none."""

__all__ = ("GROUP", "hookimpl", "hookspec")

GROUP = "djinn"
"""Group of the plugins' entry points, and the project name in pluggy's markers."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


# Phase "register": a session is composed, or the device is registered on `import djinn`.


@hookspec
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the settings of a plugin.

    Called:
        Phase *register*, once per session and once per server, before objects are registered. All implementations run;
        order is irrelevant.

    Args:
        settings: Accepts a class: ``settings.add(MySettings)``. See `djinn.settings.setting`.

    Raises:
        PluginValidationError: A field of the class is no setting, or another plugin has a setting of that name.

    Since:
        0.1.0
    """


@hookspec
def djinn_register_interceptors(register: Callable[[kinds.Interceptor], None]) -> None:
    """Register interceptors, which route PyTorch's operations to a session.

    Called:
        On ``import djinn`` for the chosen interceptor, and again whenever a session is composed.

    Args:
        register: Accepts a `djinn.kinds.Interceptor`. djinn calls its ``install`` method later, and only if the
            interceptor is chosen.
    """


@hookspec
def djinn_register_shapes(register: Callable[[kinds.ShapeInference], None]) -> None:
    """Register shape inference.

    Args:
        register: Accepts a `djinn.kinds.ShapeInference`.
    """


@hookspec
def djinn_register_classifiers(register: Callable[[kinds.Classifier], None]) -> None:
    """Register classifiers, which decide how an operation is executed.

    Args:
        register: Accepts a `djinn.kinds.Classifier`.
    """


@hookspec
def djinn_register_sources(register: RegisterOfLibrary) -> None:
    """Register sources, which make graphs of models.

    Args:
        register: Accepts a `djinn_plugins.graph.kinds.GraphSource`.
    """


@hookspec
def djinn_register_analyzers(register: RegisterOfLibrary) -> None:
    """Register analyzers, which give a graph meaning.

    Args:
        register: Accepts a `djinn_plugins.graph.kinds.Analyzer`.
    """


@hookspec
def djinn_register_patterns(register: RegisterOfLibrary) -> None:
    """Register patterns, which find structures in a graph.

    Args:
        register: Accepts a `djinn_plugins.graph.kinds.Pattern`.
    """


@hookspec
def djinn_register_exporters(register: RegisterOfLibrary) -> None:
    """Register exporters, which write a graph with its meaning to a file.

    Args:
        register: Accepts a `djinn_plugins.graph.kinds.Exporter`. The suffix of the file selects it.
    """


@hookspec
def djinn_register_schedulers(register: RegisterOfLibrary) -> None:
    """Register schedulers, which decide which device runs what.

    Args:
        register: Accepts a `djinn_plugins.schedule.kinds.GraphScheduler`.
    """


@hookspec
def djinn_register_backends(register: Callable[[kinds.BackendFactory], None]) -> None:
    """Register backends, which carry out a session's tape on several executors.

    Args:
        register: Accepts a `djinn.kinds.BackendFactory`.
    """


@hookspec
def djinn_register_caches(register: Callable[[kinds.CacheFactory], None]) -> None:
    """Register caches of results.

    Args:
        register: Accepts a `djinn.kinds.CacheFactory`. It opens a cache only if the settings ask for one.
    """


@hookspec
def djinn_register_memory(register: RegisterOfLibrary) -> None:
    """Register memory managers, which keep the sessions of a server within its device memory.

    Args:
        register: Accepts a `djinn_plugins.common.kinds.memory.MemoryFactory`. A server opens a manager only if its
        memory is
            limited.
    """


@hookspec
def djinn_register_transports(register: Callable[[kinds.Transport], None]) -> None:
    """Register transports, which connect to remote executors.

    Args:
        register: Accepts a `djinn.kinds.Transport`. The scheme of the address selects it. Both ends use it: a session
            connects, and a server listens.
    """


@hookspec
def djinn_register_executors(register: RegisterOfLibrary) -> None:
    """Register executor factories, which open devices.

    Args:
        register: Accepts a `djinn_plugins.common.kinds.executor.ExecutorFactory`. The device selects it.
    """


@hookspec
def djinn_register_guards(register: RegisterOfLibrary) -> None:
    """Register guards, which check the programs of a server's clients before they run.

    Args:
        register: Accepts a `djinn_plugins.common.kinds.guard.Guard`. Only a server uses one.
    """


@hookspec
def djinn_register_observers(register: Callable[[kinds.Observer], None]) -> None:
    """Register observers, which receive a session's counters.

    Called:
        Whenever a session is composed, before it connects: observers may show how it connects.

    Args:
        register: Accepts a `djinn.kinds.Observer`.
    """


@hookspec
def djinn_register_authenticators(register: RegisterOfLibrary) -> None:
    """Register authenticators, which say who a server's clients are.

    Args:
        register: Accepts a `djinn_plugins.server.kinds.authenticator.AuthenticatorFactory`. A server's gateway opens
        the authenticator.
    """


@hookspec
def djinn_register_stores(register: RegisterOfLibrary) -> None:
    """Register model stores, from which a server's clients load models by name.

    Args:
        register: Accepts a `djinn_plugins.server.kinds.store.ModelStoreFactory`. A server's gateway opens the store.
    """


@hookspec
def djinn_register_engines(register: RegisterOfLibrary) -> None:
    """Register engines, which run the servers of a cluster.

    Args:
        register: Accepts a `djinn_plugins.cluster.kinds.EngineFactory`. Only ``djinn cluster`` opens an engine, for one
            cluster.
    """


@hookspec
def djinn_register_admissions(register: RegisterOfLibrary) -> None:
    """Register admission policies, which decide who may start on a server's devices, and who runs next.

    Args:
        register: Accepts a `djinn_plugins.server.kinds.admission.AdmissionFactory`. A server's gateway opens the
        policy.
    """


@hookspec
def djinn_register_metrics(register: RegisterOfLibrary) -> None:
    """Register outputs of a server's metrics, which write or show what a server counts.

    Args:
        register: Accepts a `djinn_plugins.server.kinds.metrics.MetricsFactory`. A server's gateway opens the output.
    """


@hookspec
def djinn_register_modes(register: RegisterOfLibrary) -> None:
    """Register run modes, in which ``djinn run`` lets a script use the remote device.

    Args:
        register: Accepts a `djinn_plugins.run.kinds.RunMode`. It changes nothing in the process before ``djinn run``
            enters it.
    """


# Phase "calibration": `djinn.calibrate` was called.


@hookspec
def djinn_register_workloads(register: RegisterOfLibrary) -> None:
    """Register workloads, by which `djinn.calibrate` finds out how fast an executor is.

    Called:
        Phase *calibration*, once per `djinn.calibrate`, while a session runs. All implementations run; workloads are
        run in the order of their names.

    Args:
        register: Accepts a `djinn_plugins.schedule.workloads.Workload`; may be called once per operation and size. Its
            ``prepare`` is called later; nothing is recorded before.

    Raises:
        PluginValidationError: The object is not a workload, or its name is taken.

    Since:
        0.1.0
    """


# Phase "command line": the program `djinn` is starting.


@hookspec
def djinn_register_commands(app: typer.Typer, plugins: Any) -> None:
    """Add commands to the program ``djinn``.

    Called:
        Phase *command line*, once per start of the program, before arguments are read. All implementations run;
        commands are listed in the order of the plugins' names.

    Args:
        app: The program. Add commands with ``app.command("name")`` or groups with ``app.add_typer``. Imports that only
            the command needs belong inside the command.
        plugins: A `djinn.plugins.Plugins`: all plugins, with the settings that they declare.

    Raises:
        PluginValidationError: A command with that name exists already.

    Since:
        0.1.0
    """


@hookspec
def djinn_examine_system(report: Callable[[str, str, str], None]) -> None:
    """Report which features of this system a plugin can use.

    Called:
        Phase *command line*, once per ``djinn doctor``. All implementations run; their reports are listed in the order
        of the plugins' names.

    Args:
        report: Takes a name, a finding, and a suggestion, which may be empty. Findings are not problems: djinn works
            without these features.

    Raises:
        Exception: Any exception is listed as a problem, with the plugin's name.

    Since:
        0.1.0
    """


# Phase "composition": a session is put together.


@hookspec
def djinn_check_settings(settings: Settings) -> None:
    """Check settings that depend on others. What one field allows is declared with the field.

    Called:
        Phase *composition*, once per session: before anything connects, and before a running session ends. All
        implementations run; order is irrelevant.

    Args:
        settings: The settings of the session; ``settings(MySettings)`` gives those of a plugin.

    Raises:
        ConfigurationError: They contradict each other. `djinn.init` raises it, and a running session continues.

    Since:
        0.1.0
    """


@hookspec(firstresult=True)
def djinn_open_session_lock(
    interrupted: Callable[[], object], hurry: Callable[[], object]
) -> AbstractContextManager[object] | None:
    """Make the lock that a session holds while it submits something.

    Called:
        Phase *composition*, once per session, first of all. The first answer that is not ``None`` counts; without one,
        the lock is a `threading.RLock`.

    Args:
        interrupted: Cancels the submitted work; to be called before the lock is released if Ctrl-C arrived meanwhile.
        hurry: Makes the next recorded operation take the lock.

    Returns:
        A reentrant lock. With an attribute ``is_elsewhere`` that says whether another thread holds it, threads that
        record do not wait for it: their operations stay pending.

    Raises:
        Exception: Ends `djinn.init`, which raises it.

    Since:
        0.1.0
    """


@hookspec(firstresult=True)
def djinn_open_host_interop(session: Session) -> kinds.HostInterop | None:
    """Decide what happens to ordinary tensors that are used together with lazy ones.

    Called:
        Phase *composition*, once per session, after its backend is made. The first answer that is not ``None`` counts;
        without one, they are refused.

    Args:
        session: The session. It owns the answer.

    Returns:
        What handles such operations.

    Raises:
        Exception: Ends `djinn.init`, which raises it.

    Since:
        0.1.0
    """


@hookspec(firstresult=True)
def djinn_arrange_programs(session: Session) -> kinds.Arrange | None:
    """Give a function that orders the nodes of each new program.

    Called:
        Phase *composition*, once per session, before its backend is made. The first answer that is not ``None`` counts;
        without one, programs run in the order in which they were recorded.

    Args:
        session: The session; its backend does not exist yet.

    Returns:
        Called once for each new program, with its nodes in program order. It gives their positions in the order in
        which they run, or ``None`` for program order.

    Raises:
        Exception: Ends `djinn.init`, which raises it.

    Since:
        0.1.0
    """


@hookspec(firstresult=True)
def djinn_resolve_server(plugins: Any) -> str | None:
    """Name the executor of a session that has no address of one.

    Called:
        Phase *composition*, whenever such a session connects, also after its server has died. The first answer that is
        not ``None`` counts; without one, the executor is in this process.

    Args:
        plugins: The plugins of the session, a `djinn.kinds.backend.PluginRegistry` with its settings.

    Returns:
        An address, such as ``tcp://host:port``.

    Raises:
        DjinnError: There is none; connecting has failed.

    Since:
        0.1.0
    """


@hookspec(firstresult=True)
def djinn_replace_server(plugins: Any, address: str, error: Exception) -> str | None:
    """Name another executor for a session that begins, in place of one that cannot be reached.

    Called:
        Phase *composition*, once for each server that does not answer when the session begins. The first answer that is
        not ``None`` counts; without one, `djinn.init` raises the error.

    Args:
        plugins: All plugins, with the settings of the session.
        address: The server's address.
        error: Why it cannot be reached.

    Returns:
        An address; empty for an executor in this process.

    Raises:
        Exception: Ends `djinn.init`, which raises it.

    Since:
        0.1.0
    """


@hookspec
def djinn_wrap_backend(
    context: kinds.BackendContext
) -> kinds.Layer | Callable[[kinds.OpenBackend], kinds.OpenBackend] | None:
    """Wrap the backend of a session.

    Called:
        Phase *composition*, once per session. All implementations run; `djinn.session.layers` has the order of djinn's
        own layers.

    Args:
        context: Settings, plugins, what the layers share, and what else a backend needs.

    Returns:
        ``None`` to leave the backend alone. Otherwise a `djinn.kinds.Layer`, with a function that is given what opens
        the backend, and returns what opens the wrapped one, often a `djinn.kinds.backend_wrapper.BackendWrapper`. A
        layer may open the inner backend again, on other connections. Plugins that `djinn.session.layers` lists return
        the function alone.

    Raises:
        Exception: Ends `djinn.init`, which raises it.

    Since:
        0.1.0
    """


@hookspec
def djinn_wrap_connection(
    context: kinds.BackendContext
) -> kinds.Layer | Callable[[kinds.Connection], kinds.Connection] | None:
    """Wrap the connections to a session's executors.

    Called:
        Phase *composition*: whenever a backend is opened, also after a recovery. All implementations run;
        `djinn.session.layers` has the order of djinn's own layers.

    Args:
        context: Settings, plugins, what the layers share, and what else a backend needs.

    Returns:
        ``None`` to leave connections alone. Otherwise a `djinn.kinds.Layer`, with a function that is given each
        connection and returns what takes its place: something with all that a `djinn.kinds.Connection` has, which
        passes on the optional methods that it finds (`djinn.kinds.connection_wrapper.ConnectionWrapper` does). Plugins
        that `djinn.session.layers` lists return the function alone.

    Raises:
        Exception: Ends `djinn.init`, which raises it.

    Since:
        0.1.0
    """


@hookspec
def djinn_session_started(session: Session) -> None:
    """React to a new session.

    Called:
        Phase *session*, once per session, after all plugins are chosen and before the first operation. All
        implementations run; order is irrelevant.

    Args:
        session: The session. Do not keep it alive: hold a weak reference.

    Raises:
        Exception: Any exception reaches the caller of ``djinn.init``; the session is closed again.

    Since:
        0.1.0
    """


@hookspec
def djinn_session_closed(stats: Mapping[str, int]) -> None:
    """React to the end of a session.

    Called:
        Phase *session*, once per session, after its connection is closed. All implementations run; order is irrelevant.

    Args:
        stats: The last counters, as returned by `djinn.stats`. Must not be changed.

    Raises:
        Exception: Any exception is logged with the plugin's name and not raised.

    Since:
        0.1.0
    """
