"""Finds comparisons that are true on CUDA and false here: ``x.device.type == "cuda"``.

A remote tensor's device is called ``remote_accelerator:0``, and nothing can observe how a program compares it, so the
program's source is searched before it runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ("comparisons", "hint")

MAX_FILES = 200
"""Modules of the program that are searched, in breadth-first order of their imports."""


def hint(script: str) -> str:
    """Say where the program compares devices of tensors with CUDA; empty if it does so nowhere."""
    found = [f"{path}:{line}" for path in _files(Path(script)) for line in comparisons(_read(path))]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"{found[0]}{more}: a device is compared with 'cuda'. That of a remote tensor is 'remote_accelerator', "
            "also with --as cuda; if the device is a tensor's, ask tensor.is_cuda.")


def comparisons(source: str) -> list[int]:
    """Return the lines on which ``….device``, or its type, is compared with CUDA."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []  # Python reports it when it runs the program
    return sorted({node.lineno for node in ast.walk(tree) if isinstance(node, ast.Compare) and _is_meant(node)})


def _is_meant(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return any(map(_is_device, sides)) and any(map(_says_cuda, sides))


def _is_device(node: ast.expr) -> bool:
    """Whether it is ``….device`` or ``….device.type``."""
    if isinstance(node, ast.Attribute) and node.attr == "type":
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == "device"


def _says_cuda(node: ast.expr) -> bool:
    """Whether it is a string with that name, a device made of one, or a collection that contains one."""
    if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
        return any(map(_says_cuda, node.elts))
    if isinstance(node, ast.Call):
        return bool(node.args) and _says_cuda(node.args[0])
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")


def _files(script: Path) -> Iterator[Path]:
    """Return the script, and the modules beside it that it imports directly or through another of these."""
    waiting, seen = [script], {script}
    while waiting and len(seen) <= MAX_FILES:
        path = waiting.pop(0)
        yield path
        for name in _imported(_read(path)):
            base = script.parent.joinpath(*name.split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate not in seen and candidate.is_file():
                    seen.add(candidate)
                    waiting.append(candidate)


def _imported(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def main_script() -> str:
    """Return the path of the program that this process runs, or nothing."""
    return getattr(sys.modules.get("__main__"), "__file__", None) or ""
