"""Mutants, and how one is planted: the code of one function of the product is replaced in this process."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any

import attrs

DEFAULTS = "djinn-executor-cpu"
"""A plugin whose session is that of the defaults."""
TCP = "djinn-transport-tcp"
SERVED = "a server"
"""No plugin: the session of the defaults whose executor is that of a server, so that clients alone can be faulty."""


class PlantingError(Exception):
    """The product has changed, so that a mutant cannot be planted where it was."""


@attrs.frozen
class Mutant:
    """One fault.

    Attributes:
        name: What is wrong, in words with hyphens.
        law: The law that must notice.
        at: The function that is replaced, ``module:name`` or ``module:class.name``.
        edits: Texts that occur once in the function's source, and what stands there instead.
        within: What is enough to look at: operators, entries of a database, or cases with wildcards; empty for
            everything.
        over: The plugin in whose session it is planted, or `SERVED`.
    """

    name: str
    law: str
    at: str
    edits: tuple[tuple[str, str], ...]
    within: tuple[str, ...] = ()
    over: str = DEFAULTS


def mutant(
    name: str, law: str, at: str, old: str, new: str, *more: str, within: str = "", over: str = DEFAULTS
) -> Mutant:
    """Make a mutant; ``within`` lists names that are parted by blanks, ``more`` further texts in pairs."""
    texts = (old, new, *more)
    return Mutant(name, law, at, tuple(zip(texts[::2], texts[1::2], strict=True)), tuple(within.split()), over)


def plant(mutant: Mutant) -> None:
    """Replace the code of the mutant's function, for everybody who has the function already.

    Raises:
        PlantingError: There is no such function, or its source is another by now.
    """
    function = _function(mutant.at)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in mutant.edits:
        if source.count(old) != 1:
            raise PlantingError(f"{mutant.name}: {mutant.at} has {old!r} {source.count(old)} times, not once: "
                                "plant the fault where it belongs now")
        source = source.replace(old, new)
    flags = __future__.annotations.compiler_flag
    made = _code(compile(source, f"<{mutant.name}>", "exec", flags, dont_inherit=True), function.__name__)
    if made is None or made.co_freevars != function.__code__.co_freevars:
        raise PlantingError(f"{mutant.name}: {mutant.at} cannot be replaced")
    function.__code__ = made


def _function(path: str) -> FunctionType:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    found = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    if not isinstance(found, FunctionType):
        raise PlantingError(f"there is no function {path}")
    return found


def _code(code: CodeType, name: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            if (inner := _code(constant, name)) is not None:
                return inner
    return None
