"""Interpreters that have PyTorch: forks of one that has imported it, for the many processes that tests start.

The import takes seconds of a processor, a fork takes milliseconds. djinn and its plugins are imported after the fork,
as in any other process; that an interpreter of its own does it too is what the tests of the command line see. Servers
are forked from a second one, which has imported these as well: that is half of what it takes to start them. Runs of
pytest are forked from a third one, which has imported what the conformance kit begins with; processes that judge
samples of PyTorch's database, from a fourth one, which has loaded it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any, NoReturn, Self

__all__ = ("WarmPython", "begin", "clean_environment", "run_djinn", "run_pytest", "run_python", "run_script", "share",
           "start_server", "start_worker")

_DJINN = "from djinn_plugins.cli.app import main; main()"
_PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"

_FORKS = multiprocessing.get_context("forkserver")
_WITHOUT_DJINN: Any = forkserver._forkserver  # type: ignore[attr-defined]  # there is no public way to have two
# What djinn imports of others is the same for everybody, too.
_PRELOADED = [
    "torch._dynamo", "anyio._backends._asyncio", "anyio.from_thread", "anyio.streams.buffered", "anyio.to_thread",
    "attrs", "cattrs", "http.server", "hypothesis.internal.conjecture.engine", "hypothesis.strategies", "msgspec",
    "networkx", "numpy", "pluggy", "prometheus_client", "pytest", "rich.console", "rich.table", "trio",
    "typer._adapters", "typer.main", "xml.sax.saxutils"]
_WITHOUT_DJINN.set_forkserver_preload(_PRELOADED)


class _Branch(forkserver.ForkServer):
    """An interpreter that is a fork of the first one, and imports more before it is forked itself.

    Args:
        module: What it imports.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module
        self._process: Any = None

    def ensure_running(self) -> None:
        """Start it, if it has not been started."""
        with self._lock:  # type: ignore[attr-defined]  # there is no public way, as above
            if self._process is not None:
                return
            address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]  # as above
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                if not util.is_abstract_socket_namespace(address):
                    Path(address).chmod(0o600)
                listener.listen()
                # It ends when nobody has the other end any more.
                reader, self._writer = _FORKS.Pipe(duplex=False)
                with reader:
                    self._process = _FORKS.Process(target=_serve_forks, args=(listener, reader, self._module))
                    self._process.start()
            # No process that ends, such as a fork of this one, ends it for the others.
            multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # as above
            self._forkserver_address, self._forkserver_alive_fd = address, self._writer.fileno()


def _serve_forks(listener: socket.socket, alive: Connection, module: str) -> None:
    forkserver.main(listener.detach(), alive.fileno(), [module])


_WITH_DJINN = _Branch("support.processes.loaded")
_WITH_KIT = _Branch("support.processes.kit")
_WITH_DATABASE = _Branch("support.processes.judging")


class _BranchPopen(popen_forkserver.Popen):
    """A fork of one of these; the class that it is derived from knows only one forkserver."""

    def __init__(self, process_obj: Any, server: forkserver.ForkServer) -> None:
        self._server = server
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, writer = self._server.connect_to_new_process(self._fds)
        # The fork ends this process's silence by itself as long as this end is open.
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(writer), self.sentinel))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _LoadedProcess(_FORKS.Process):  # type: ignore[name-defined]  # an attribute that is a class
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _BranchPopen(process_obj, _WITH_DJINN)


class _KitProcess(_FORKS.Process):  # type: ignore[name-defined]  # as above
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _BranchPopen(process_obj, _WITH_KIT)


class _JudgingProcess(_FORKS.Process):  # type: ignore[name-defined]  # as above
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _BranchPopen(process_obj, _WITH_DATABASE)


class WarmPython:
    """``python -c program arguments``; as much of `subprocess.Popen` as tests need.

    Args:
        program: What it does.
        arguments: The rest of ``sys.argv``.
        environment: Its whole environment; ``PYTHONPATH`` goes before what this process has.
        log: Where it writes its errors.
        folder: Where it works; here, if ``None``.
        prints: Whether what it prints is read from ``stdout``; it goes to the log otherwise.
        has_djinn: Whether djinn and its plugins have been imported before it begins, unless the environment chooses
            plugins.
        has_kit: The same of what the conformance kit begins with.
        has_database: The same of PyTorch's database of samples and of what sessions begin with.
        reads: Whether its standard input is written to ``stdin``.

    Attributes:
        stdin: What it reads; for processes that do.
        stdout: What it prints.
    """

    def __init__(self, program: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path,
                 folder: Path | None = None, prints: bool = True, has_djinn: bool = False, has_kit: bool = False,
                 has_database: bool = False, reads: bool = False) -> None:
        log.write_bytes(b"")
        reader, writer = _FORKS.Pipe(duplex=False)
        given, giver = _FORKS.Pipe(duplex=False)
        # Which device `import djinn` makes is chosen by these.
        is_special = any(environment.get(name) for name in ("DJINN_PLUGINS", "DJINN_RUN_AS"))
        kind = next((kind for kind, is_wanted in ((_LoadedProcess, has_djinn), (_KitProcess, has_kit),
                                         (_JudgingProcess, has_database))
                     if is_wanted and not is_special), _FORKS.Process)
        self._process = kind(target=_become, daemon=True, args=(
            program, list(arguments), dict(environment), given if reads else None, writer if prints else None,
            str(log.absolute()), str(folder or Path.cwd())))
        with reader, writer, given, giver:
            self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
            self.stdin = os.fdopen(os.dup(giver.fileno()), "w", encoding="utf-8") if reads else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.kill()
        self._process.join()
        self.stdout.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends, and return its exit status.

        Raises:
            TimeoutExpired: It goes on.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if it goes on."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it by force."""
        self._process.kill()


def start_server(program: str, arguments: list[str], environment: dict[str, str], log: Path) -> WarmPython:
    """Start a server of the conformance kit: see `djinn_conformance.serving.StartProcess`."""
    return WarmPython(program, arguments, environment=environment, log=log, has_djinn=True)


def start_worker(program: str, arguments: list[str], environment: dict[str, str]) -> WarmPython:
    """Start a process that judges samples: see `djinn_conformance.workers.StartJudge`."""
    return WarmPython(program, arguments, environment=environment, log=Path(os.devnull), has_database=True, reads=True)


def begin() -> None:
    """Start the first interpreter, which imports meanwhile what takes seconds."""
    _WITHOUT_DJINN.ensure_running()


def share() -> None:
    """Start the interpreters that are forked, so that all forks of this process have them in common."""
    for server in (_WITHOUT_DJINN, _WITH_DJINN, _WITH_KIT, _WITH_DATABASE):
        server.ensure_running()
    os.register_at_fork(after_in_child=_forget_parent)


def _forget_parent() -> None:
    # Only its parent can ask whether it runs.
    _WITHOUT_DJINN.ensure_running = lambda: None


def clean_environment(**environ: str) -> dict[str, str]:
    """This process's environment variables without its settings of djinn, and further ones."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")} | environ


def run_djinn(*arguments: str, path: Path | None = None, folder: Path | None = None, timeout_s: float = 120.0,
              **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the program ``djinn`` until it ends, as `run_python` runs a program.

    What it needs has been imported before, but for ``djinn run``: when a script meets djinn is what matters there.
    """
    return run_python(_DJINN, *arguments, path=path, folder=folder, timeout_s=timeout_s,
                      has_djinn=arguments[:1] != ("run",), **environ)


def run_python(program: str, *arguments: str, path: Path | None = None, folder: Path | None = None,
               timeout_s: float = 120.0, has_djinn: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -c program arguments`` until it ends, without this process's settings of djinn.

    Args:
        program: What it does.
        *arguments: The rest of ``sys.argv``.
        path: A further folder of modules and distributions.
        folder: Where it works; here, if ``None``.
        timeout_s: It is killed after that long.
        has_djinn: Whether djinn and its plugins have been imported before it begins.
        **environ: Further environment variables.
    """
    environment = clean_environment(**environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [environment.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "log"
        with WarmPython(program, arguments, environment=environment, log=log, folder=folder,
                        has_djinn=has_djinn) as process:
            patience = threading.Timer(timeout_s, process.kill)
            patience.start()
            printed = process.stdout.read()
            status = process.wait()
            patience.cancel()
        return subprocess.CompletedProcess([program, *arguments], status, printed, log.read_text())


def run_script(path: Path, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run ``python path arguments`` until it ends, as `run_python` runs a program."""
    program = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(program, str(path), *arguments, path=path.parent, timeout_s=timeout_s)


def run_pytest(arguments: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: Path,
               timeout_s: float, has_kit: bool = True) -> int:
    """Run pytest in a folder; return its exit status, and leave what it says in a file.

    What Hypothesis finds in the sources of the modules that are loaded it keeps here, for the next run.

    Raises:
        TimeoutExpired: It took too long; what it said so far is in the file.
    """
    environment = {"HYPOTHESIS_STORAGE_DIRECTORY": str(Path.cwd() / ".hypothesis"), **environment}
    with WarmPython(_PYTEST, arguments, environment=environment, log=output, folder=folder, prints=False,
                    has_kit=has_kit) as process:
        return process.wait(timeout_s)


def _become(program: str, arguments: list[str], environment: dict[str, str], stdin: Connection | None,
            stdout: Connection | None, log: str, folder: str) -> None:
    # The collector need not look through what was imported before the fork, nor copy it by looking.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    with Path(log).open("ab") as errors, stdout or contextlib.nullcontext():
        os.dup2((stdout or errors).fileno(), 1)
        os.dup2(errors.fileno(), 2)
    if stdin is not None:
        with stdin:
            os.dup2(stdin.fileno(), 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # to the end
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    folders = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    # What was imported came from the others.
    _forget_shadowed([folder for folder in folders if folder not in sys.path])
    sys.path[:0] = ["", *folders]
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except (Exception, KeyboardInterrupt):
        _end_with_traceback()
    finally:
        # An interpreter of its own ends so; one of multiprocessing's leaves the second out.
        _leave_operators()
        threading._shutdown()  # type: ignore[attr-defined]  # there is no public way
        atexit._run_exitfuncs()


def _end_with_traceback() -> NoReturn:
    """Show the error before functions run that are registered for the end, as an interpreter of its own does."""
    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is one
    sys.exit(1)


def _leave_operators() -> None:
    """Keep PyTorch from taking each operator back at the end, which takes longer than the fork."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no public way
        found = finalizer.peek()
        if found and found[1].__module__ == "torch.library":
            finalizer.atexit = False


def _forget_shadowed(folders: Sequence[str]) -> None:
    """Forget packages imported before the fork if these folders have another of the same name, which then counts."""
    shadowed = set()
    for name, module in sys.modules.items() if folders else ():
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        # Python has imported much of its own library before it looks at any folder.
        if origin is not None and "." not in name and name not in sys.stdlib_module_names:
            found = PathFinder.find_spec(name, folders)
            if found is not None and found.origin not in (None, origin):
                shadowed.add(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
        del sys.modules[name]
