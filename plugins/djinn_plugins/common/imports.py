"""Actions that run after a program has imported a module, without importing it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ("follow_imports", "when_imported")


@contextlib.contextmanager
def when_imported(names: Iterable[str], act: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call a function after modules were executed; at once for those that are imported already.

    Args:
        names: Full names of the modules.
        act: Is given the module. The program's import fails if it raises.
    """
    watch = follow_imports(names, act)
    try:
        yield
    finally:
        sys.meta_path.remove(watch)


def follow_imports(names: Iterable[str], act: Callable[[ModuleType], None]) -> MetaPathFinder:
    """As `when_imported`, until the returned finder is removed from ``sys.meta_path``."""
    watch = _ImportWatch(frozenset(names), act)
    for name in watch.names:
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            act(module)
    sys.meta_path.insert(0, watch)
    return watch


class _ImportWatch(MetaPathFinder):
    def __init__(self, names: frozenset[str], act: Callable[[ModuleType], None]) -> None:
        self.names = names
        self._act = act

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        """Let the other finders find the module, and add the action to its execution."""
        if fullname not in self.names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        """Replace the loader's method for this one execution; the loader itself stays what programs expect."""
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None or not hasattr(loader, "__dict__"):
            return

        def execute_and_act(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._act(module)

        loader.exec_module = execute_and_act
