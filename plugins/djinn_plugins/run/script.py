"""Runs a program in this process as ``python`` would."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType

import attrs

from djinn.errors import ConfigurationError

__all__ = ("Script",)

STANDARD_INPUT = "-"


@attrs.frozen
class Script:
    """A program and its arguments.

    Attributes:
        name: A file, a folder or archive with a ``__main__.py``, ``-`` for standard input, or the name of a module.
        arguments: Its arguments.
        is_module: Whether it is the name of a module.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Check that it exists, as far as this is possible without running it.

        Raises:
            ConfigurationError: It does not exist.
        """
        if self.is_module:
            top = self.name.partition(".")[0]
            sys.path.insert(0, str(Path.cwd()))
            try:
                found = find_spec(top)
            except (ImportError, ValueError):
                found = None
            finally:
                del sys.path[0]
            if found is None:
                raise ConfigurationError(f"There is no module {self.name}.",
                                         hint=f"Install it, or correct the name. A file is run without -m: djinn run "
                                              f"{self.name.replace('.', '/')}.py")
        elif self.name != STANDARD_INPUT and not Path(self.name).is_file() and not (
                Path(self.name, "__main__.py").is_file()):
            raise ConfigurationError(f"There is no file {self.name}.",
                                     hint="Name a Python file, or a module with -m MODULE. Options of djinn run come "
                                          "before it, those of the program after it.")

    def run(self) -> int:
        """Run it as the module ``__main__``.

        An exception that the program does not handle is printed as Python prints it.

        Returns:
            The exit status; minus the number of SIGINT if Ctrl-C has ended it.

        Raises:
            SystemExit: The program raises it.
        """
        # The command line that reads the arguments of `djinn run` has set its own.
        sys.excepthook = sys.__excepthook__
        try:
            self._execute()
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  # printed as Python would print it
            import signal

            shown = error.with_traceback(_without_own_frames(error))
            sys.excepthook(type(shown), shown, shown.__traceback__)
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _execute(self) -> None:
        main = _new_main()
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            sys.argv[0] = "-m"
            _set_first_path(str(Path.cwd()))
            runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]  # what `python -m` calls
        elif self.name == STANDARD_INPUT:
            _set_first_path("")
            exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102  # the program
        elif Path(self.name).is_dir() or _is_archive(self.name):
            _set_first_path(os.path.abspath(self.name), always=True)  # noqa: PTH100  # as below
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as `python FOLDER` does
        else:
            path = os.path.abspath(self.name)  # noqa: PTH100  # unlike `Path.absolute`, it removes "..", as Python does
            main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            _set_first_path(str(Path(path).resolve().parent))
            with io.open_code(path) as file:
                source = file.read()
            exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  # the program


def _new_main() -> ModuleType:
    """Replace the module ``__main__``: what is pickled by name is looked for there, by child processes, too."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _set_first_path(folder: str, *, always: bool = False) -> None:
    """Replace the folder of the program ``djinn`` by that of the program to run, unless Python was told to add none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def _is_archive(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _without_own_frames(error: BaseException) -> TracebackType | None:
    """Leave out the frames of this module, with which the traceback begins, and that of the handler of Ctrl-C."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_globals.get("__name__") == __name__:
        first = first.tb_next
    last = first
    while isinstance(error, KeyboardInterrupt) and last is not None and last.tb_next is not None:
        if last.tb_next.tb_next is None and last.tb_next.tb_frame.f_globals.get("__name__", "").startswith("djinn_"):
            last.tb_next = None
            break
        last = last.tb_next
    return first
