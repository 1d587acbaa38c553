"""Decides which operators a server runs: by rules, and by a reviewed list for each release of PyTorch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import attrs
import torch

from djinn.errors import UnknownOperatorError
from djinn_plugins.common.operators.named_values import NAMED_OPERATORS
from djinn_plugins.common.operators.operators import LAYER_OPERATORS, operator_named
from djinn_plugins.common.operators.random_exchange import EXCHANGE
from djinn_plugins.common.operators.stated_roles import ROLE_OPERATORS
from djinn_plugins.common.operators.stored_models import STORED_OPERATORS
from djinn_plugins.common.sparse.operators import NAMES as SPARSE

__all__ = (
    "ALLOWED",
    "GENERAL",
    "UNREVIEWED",
    "Denial",
    "classified",
    "classify",
    "lists",
    "release",
    "require_allowed",
    "written",
)

ALLOWED = "allowed"
INTERNAL = "internal"
UNREVIEWED = "unreviewed"
NAMESPACE = "aten"
GENERAL = {
    INTERNAL: "It is internal to PyTorch, and no public function records it.",
    UNREVIEWED: "This release of PyTorch has it and no reviewed one.",
}
"""Reasons that are not in the rules."""


@attrs.frozen
class Denial:
    """A group of operators that are not permitted."""

    group: str
    reason: str
    patterns: tuple[re.Pattern[str], ...] = ()
    types: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    exceptions: tuple[re.Pattern[str], ...] = ()

    def fits(self, name: str, operator: torch._ops.OpOverload) -> bool:
        """Whether an overload, named without namespace, belongs to this group."""
        if any(pattern.fullmatch(name) for pattern in self.exceptions):
            return False
        if any(pattern.fullmatch(name) for pattern in self.patterns):
            return True
        schema = operator._schema
        kinds = [str(item.type) for item in (*schema.arguments, *schema.returns)]
        return any(word in kind for word in self.types for kind in kinds) or any(
            tag.name in self.tags for tag in operator.tags)


@cache
def _rules() -> tuple[tuple[Denial, ...], tuple[re.Pattern[str], ...]]:
    text = (resources.files("djinn_plugins.guard") / "rules.toml").read_text(encoding="utf-8")
    read: Mapping[str, Any] = tomllib.loads(text)
    denials = tuple(
        Denial(entry["group"], entry["reason"], tuple(map(re.compile, entry.get("patterns", ()))),
               tuple(entry.get("types", ())), tuple(entry.get("tags", ())),
               tuple(map(re.compile, entry.get("except", ()))))
        for entry in read["denied"])
    return denials, tuple(map(re.compile, read["internals"]["patterns"]))


def reasons() -> dict[str, str]:
    """Map the groups of forbidden operators to the reasons."""
    return {denial.group: denial.reason for denial in _rules()[0]} | GENERAL


def classify(operator: torch._ops.OpOverload) -> str:
    """Return the group of one of PyTorch's overloads by the rules alone: `ALLOWED`, or the group that forbids it."""
    denials, internals = _rules()
    name = operator.name().partition("::")[2]
    for denial in denials:
        if denial.fits(name, operator):
            return denial.group
    if name.startswith("_") and not any(pattern.fullmatch(name) for pattern in internals):
        return INTERNAL
    return ALLOWED


def classified() -> dict[str, str]:
    """Return the groups of all overloads in the running PyTorch's own namespace, by name."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::"))
    return {name: classify(operator_named(name)) for name in sorted(names)}


def release() -> str:
    """Return the running release of PyTorch, without the build suffix."""
    return str(torch.__version__).partition("+")[0]


@cache
def lists() -> Mapping[str, Mapping[str, str]]:
    """Read the reviewed lists: the group of every overload, by release.

    The first line of the file names the releases. A line without releases holds for all of them.
    """
    text = (resources.files("djinn_plugins.guard") / "overloads.txt").read_text(encoding="utf-8")
    first, *lines = text.splitlines()
    groups: dict[str, dict[str, str]] = {version: {} for version in first.split()}
    for group, name, *versions in map(str.split, lines):
        for version in versions or groups:
            groups[version][name] = group
    return groups


def written(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Format the reviewed lists as the content of ``overloads.txt``."""
    found: dict[tuple[str, str], list[str]] = {}
    versions = sorted(groups, key=lambda version: [int(part) for part in version.split(".")])
    for version in versions:
        for name, group in groups[version].items():
            found.setdefault((name, group), []).append(version)
    lines = [" ".join([group, name, *(those if len(those) < len(versions) else ())])
             for (name, group), those in sorted(found.items())]
    return "\n".join([" ".join(versions), *lines]) + "\n"


@cache
def group_of(name: str) -> str:
    """Return the group of an existing overload.

    In an unreviewed release, overloads that were reviewed for another release are permitted if the rules still allow
    them.
    """
    reviewed = lists()
    mine = reviewed.get(release())
    if mine is not None:
        return mine.get(name, UNREVIEWED)
    group = classify(operator_named(name))
    return group if any(name in other for other in reviewed.values()) or group != ALLOWED else UNREVIEWED


def require_allowed(operator: torch._ops.OpOverload, namespaces: frozenset[str]) -> None:
    """Check that an overload may be run.

    Args:
        operator: The overload.
        namespaces: Permitted namespaces besides PyTorch's own.

    Raises:
        UnknownOperatorError: The overload is not permitted; says why.
    """
    name, namespace = operator.name(), operator.namespace
    if name == EXCHANGE or any(
            name in own for own in (LAYER_OPERATORS, STORED_OPERATORS, NAMED_OPERATORS, ROLE_OPERATORS, SPARSE)):
        return
    if namespace == NAMESPACE:
        group = group_of(name)
        if group != ALLOWED:
            raise UnknownOperatorError(f"{name} is not run here: {reasons()[group]}",
                                       hint="Use `.cpu()` on its operands, or on the module that calls it, and run "
                                       "this part locally.")
    elif namespace not in namespaces:
        raise UnknownOperatorError(f"{name} is not run here: the server runs no operators of {namespace!r}.",
                                   hint=f"Serve with --allow-namespace {namespace} if they can be trusted.")
