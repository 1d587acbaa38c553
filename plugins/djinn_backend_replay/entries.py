"""What a journal consists of: everything that makes values, in the order in which executors carry it out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import attrs
import torch

from djinn.ir.schema import facts_of, operator_named
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.views import is_view, is_view_anywhere
from djinn_backend_replay.retained import Kept

GENERATOR: Final = 0
"""Stands for the random generators where storages are compared; values are numbered from 1."""


@attrs.define(eq=False)
class Upload:
    """A tensor that was sent, or a state that the random numbers of one device were given.

    Attributes:
        number: The value, or `djinn.wire.messages.GENERATOR_HANDLE`.
        kept: What was sent, unless it was not kept.
        device: Where to.
        spec: What is known of it.
        why: Why it was not kept.
        is_whole: Whether it leaves nothing of what was there; of several generators, it sets one.
    """

    number: int
    kept: Kept | None
    device: torch.device | None
    spec: TensorSpec
    why: str = ""
    is_whole: bool = True


@attrs.frozen(eq=False)
class Seed:
    """A seed for the random numbers of all devices."""

    seed: int


@attrs.frozen(eq=False)
class Generators:
    """The states of all random numbers at this place.

    Attributes:
        states: Each with its device.
        kind: The kind of device that has such states.
    """

    states: Sequence[tuple[torch.device | None, torch.Tensor]]
    kind: str


@attrs.frozen(eq=False)
class Snapshot:
    """The contents of a storage at this place, and its values that somebody names.

    Attributes:
        number: The value that owns the storage.
        kept: Its contents.
        spec: Metadata of that value, and where it is.
        nodes: Operations that make the others, as views.
        made: Numbers of all of them.
    """

    number: int
    kept: Kept
    spec: TensorSpec
    nodes: Sequence[Node]
    made: frozenset[int]


@attrs.define(eq=False)
class Cut:
    """Ends a piece: what was handed over together is handed over together again, and so known as a program.

    Attributes:
        node_s: Seconds that each operation of the piece took; ``None`` if that is not known yet.
    """

    node_s: float | None = None


Entry: TypeAlias = Node | Upload | Seed | Generators | Snapshot | Cut


def outputs_of(entry: Entry) -> Sequence[Any]:
    """Return the slots that an entry makes by operations."""
    if isinstance(entry, Node):
        return entry.outputs
    return [slot for node in entry.nodes for slot in node.outputs] if isinstance(entry, Snapshot) else ()


def is_plain_view(node: Node) -> bool:
    """Whether a node makes nothing but views of its one operand, which can be made again of a copy of that."""
    return (len(node.inputs) == 1 and is_view(node.signature)
            and is_view_anywhere(node.signature.template.operator))


@lru_cache(maxsize=4096)
def changes_metadata(operator: str) -> bool:
    """Whether an operator may change size, strides or storage of what it writes."""
    return facts_of(operator_named(operator)).changes_metadata
