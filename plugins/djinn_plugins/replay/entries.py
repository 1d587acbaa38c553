"""Entries of a journal: everything that produces values, in execution order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn_plugins.graph.views import is_view, is_view_anywhere
from djinn_plugins.replay.retained import Kept

GENERATOR: Final = 0
"""Represents the random generators where storages are compared; values are numbered from 1."""


@attrs.define(eq=False)
class UploadEntry:
    """A tensor that was uploaded, or a new state of one device's random generator.

    Attributes:
        number: The value, or `djinn.wire.messages.GENERATOR_HANDLE`.
        kept: The uploaded data, if it was kept.
        device: The target device.
        spec: Its metadata.
        why: Why the data was not kept.
        is_whole: Whether it replaces the whole previous state; ``False`` if it sets one of several generators.
    """

    number: int
    kept: Kept | None
    device: torch.device | None
    spec: TensorSpec
    why: str = ""
    is_whole: bool = True


@attrs.frozen(eq=False)
class SeedEntry:
    """A seed for the random generators of all devices."""

    seed: int


@attrs.frozen(eq=False)
class Generators:
    """The states of all random generators at this point.

    Attributes:
        states: Pairs of device and state.
        kind: The kind of device that these states belong to.
    """

    states: Sequence[tuple[torch.device | None, torch.Tensor]]
    kind: str


@attrs.frozen(eq=False)
class Snapshot:
    """The contents of a storage at this point, and its live values.

    Attributes:
        number: The value that owns the storage.
        kept: Its contents.
        spec: Metadata of that value, and its device.
        nodes: Operations that make the other values, as views.
        made: Numbers of all these values.
    """

    number: int
    kept: Kept
    spec: TensorSpec
    nodes: Sequence[Node]
    made: frozenset[int]


@attrs.define(eq=False)
class Cut:
    """Ends a piece: operations submitted together are submitted together again, so the server recognizes the program.

    Attributes:
        node_s: Seconds that each operation of the piece took; ``None`` if not measured yet.
    """

    node_s: float | None = None


Entry: TypeAlias = Node | UploadEntry | SeedEntry | Generators | Snapshot | Cut


def outputs_of(entry: Entry) -> Sequence[Any]:
    """Return the slots that an entry's operations produce."""
    if isinstance(entry, Node):
        return entry.outputs
    return [slot for node in entry.nodes for slot in node.outputs] if isinstance(entry, Snapshot) else ()


def is_plain_view(node: Node) -> bool:
    """Whether a node only makes views of its single operand, and can be repeated on a copy of it."""
    return (len(node.inputs) == 1 and is_view(node.signature)
            and is_view_anywhere(node.signature.template.operator))
