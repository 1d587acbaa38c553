"""The module that is running, in the format of ``nn_module_stack``, an entry of ``meta`` in ``torch.fx`` nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from djinn_plugins.graph.graph import Origin

STACK = "nn_module_stack"
_CONTAINERS = frozenset({"_modules", "_parameters", "_buffers"})
_PART = re.compile(r"[^.\[\]]+|\[(?:'[^']*'|\"[^\"]*\"|[^\]]*)\]")


def plain_path(path: str) -> str:
    """Convert a tracer's path to the form of ``named_modules``: ``L['self']._modules['h'].0`` becomes ``h.0``."""
    parts = [part.strip("[]'\"") for part in _PART.findall(path.partition("@")[0])]
    if path.startswith(("L[", "G[")):
        parts = parts[2:]
    return ".".join(part for part in parts if part not in _CONTAINERS)


def origin_of(stack: Mapping[Any, tuple[str, Any]] | None, root: str) -> Origin:
    """Return the origin of a node.

    Args:
        stack: The modules that were running, the outermost first; ``None`` if the tracer kept none.
        root: Class of the model, for nodes of the model itself.
    """
    if not stack:
        return Origin("", root, 0, "forward")
    path, kind = list(stack.values())[-1]
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return Origin(plain_path(path), name, 0, "forward")


@contextlib.contextmanager
def followed(
    model: torch.nn.Module, prefix: str, moved: Callable[[dict[str, tuple[str, Any]]], None]
) -> Iterator[None]:
    """Report each module that this thread enters and leaves within the context.

    Args:
        model: The model whose modules are followed.
        prefix: Its own path.
        moved: Receives the modules that are running now, in the format of ``nn_module_stack``.
    """
    running: list[tuple[str, Any]] = []
    handles = []

    def tell() -> None:
        moved({f"{depth}": entry for depth, entry in enumerate(running)})

    def entering(path: str) -> Callable[..., None]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            running.append((path, type(module)))
            tell()

        return enter

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        running.pop()
        tell()

    for name, module in model.named_modules():
        path = f"{prefix}.{name}" if prefix and name else prefix or name
        handles += [module.register_forward_pre_hook(entering(path), prepend=True),
                    module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
