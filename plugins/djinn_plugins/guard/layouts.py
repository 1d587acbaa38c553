"""Memory layouts of operands: kernels get dense operands, unless they are proven to respect strides.

A tensor of one element can be expanded to any size; its strides are zero then, and a kernel that assumes dense operands
reads or writes out of bounds. So an operator that is not proven gets operands with a separate memory location for each
element, and no operator writes a tensor that overlaps itself.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cache, lru_cache, partial
from importlib import resources
from itertools import pairwise
from operator import itemgetter
from typing import Any

import attrs
import torch

from djinn.ir.schema import facts_of
from djinn_plugins.common.kinds.guard import Prepared
from djinn_plugins.common.memory.shared_values import unshare
from djinn_plugins.common.memory.tensor_bytes import address_of
from djinn_plugins.common.operators.named_values import NAMED_OPERATORS
from djinn_plugins.common.operators.operators import is_as_declared
from djinn_plugins.common.operators.stated_roles import ROLE_OPERATORS
from djinn_plugins.common.sparse.operators import NAMESPACE as SPARSE
from djinn_plugins.guard.preconditions import expect, too_large

__all__ = ("Arrangement", "StridedLayout", "arrangement_of", "base_of", "is_proven", "layout_of",
           "proven_groups")

OVERLAPS_ITSELF = ("unsupported operation: more than one element of the written-to tensor refers to a single memory "
                   "location. Please clone() the tensor before performing the operation.")
OVERLAPS_ANOTHER = ("unsupported operation: some elements of two written-to tensors refer to a single memory location. "
                    "Please clone() one of them before performing the operation.")
READ_AND_WRITTEN = ("unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
                    "single memory location. Please clone() the tensor before performing the operation.")
"""The message of eager PyTorch, for the cases that it checks."""


OWN_CARE = {SPARSE: ("tensors",)}
"""By namespace: arguments of which its operators see to it themselves that kernels stay within them."""


class StridedLayout(Enum):
    """The memory layout of a tensor's elements."""

    DENSE = "dense"
    """Adjacent without gaps, in any order of dimensions."""
    GAPS = "gaps"
    """With gaps; each element has its own location."""
    OVERLAPPING = "overlapping"
    """Two elements may share a location."""


@lru_cache(maxsize=4096)
def layout_of(size: tuple[int, ...], stride: tuple[int, ...]) -> StridedLayout:
    """Classify a layout, dimension by dimension; it counts as overlapping unless that proves distinct locations."""
    if 0 in size:
        return StridedLayout.DENSE
    reach, dense = 0, 1
    layout = StridedLayout.DENSE
    for step, extent in sorted((step, extent) for extent, step in zip(size, stride, strict=True) if extent > 1):
        if step <= reach:
            return StridedLayout.OVERLAPPING
        if step != dense:
            layout = StridedLayout.GAPS
        reach += (extent - 1) * step
        dense = step * extent
    return layout


def _layout(tensor: torch.Tensor) -> StridedLayout:
    return StridedLayout.DENSE if tensor.is_contiguous() else layout_of(tuple(tensor.shape), tensor.stride())


@attrs.frozen
class _Rows:
    """Operators whose kernels assume a dense last dimension of some arguments, and respect the other strides."""

    names: frozenset[str]
    arguments: frozenset[str]
    as_they_are: frozenset[str]


@cache
def _read() -> Mapping[str, Any]:
    return tomllib.loads((resources.files("djinn_plugins.guard") / "layouts.toml").read_text(encoding="utf-8"))


def proven_groups() -> Mapping[str, Sequence[str]]:
    """Map each group of proven operators to their names."""
    return {group["group"]: group["names"].split() for group in _read()["proven"]}


@cache
def _proven() -> frozenset[str]:
    return frozenset(name for names in proven_groups().values() for name in names)


@cache
def _rows() -> tuple[_Rows, ...]:
    return tuple(_Rows(frozenset(group["names"].split()), frozenset(group["arguments"]),
                       frozenset(group.get("as_they_are", ()))) for group in _read()["rows"])


@cache
def _apart() -> Mapping[str, frozenset[str]]:
    """Map operators that do not support reading the memory they write to the arguments that they may write in place."""
    return {name: frozenset(group.get("in_place", ())) for group in _read()["apart"] for name in group["names"].split()}


def base_of(operator: torch._ops.OpOverload) -> str:
    """Return an operator's name without namespace and overload."""
    return str(operator.name()).partition("::")[2].partition(".")[0]


def is_proven(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator accepts operands of any memory layout."""
    base = base_of(operator)
    proven = _proven()
    is_listed = operator.namespace == "aten" and (base in proven or (base.endswith("_") and base[:-1] in proven))
    return is_listed or _looks_at_no_elements(operator)


def _looks_at_no_elements(operator: torch._ops.OpOverload) -> bool:
    """Whether, by its schema, an operator only makes a view, or changes which view its argument is.

    Some of these operators copy, always or if a view is impossible; copying respects strides. Those of named sessions
    and of roles keep their operands as they are.
    """
    schema = operator._schema
    if operator.name() in NAMED_OPERATORS or operator.name() in ROLE_OPERATORS:
        return True
    is_of_views = torch.Tag.inplace_view in operator.tags or torch.Tag.view_copy in operator.tags
    if is_of_views or not any("Tensor" in str(item.type) for item in schema.arguments):
        return True
    return any(item.alias_info is not None and not item.alias_info.is_write for item in schema.returns)


def _written(operator: torch._ops.OpOverload) -> frozenset[str]:
    if torch.Tag.inplace_view in operator.tags:
        return frozenset()
    facts = facts_of(operator)
    if base_of(operator) in _read()["reads_statistics"]["names"].split():
        return facts.written
    # Schemas of batch norms do not declare that the statistics are written.
    return facts.written.union(name for name in facts.argument_names if name.startswith("running_"))


def _training_flag(operator: torch._ops.OpOverload) -> tuple[int, str] | None:
    """Return position and name of the argument that, if false, makes an operator only read its statistics."""
    names = facts_of(operator).argument_names
    return next(((names.index(flag), flag) for flag in ("training", "use_input_stats") if flag in names), None)


@attrs.frozen(eq=False)
class Arrangement:
    """How the layouts of one operator's operands are handled.

    Attributes:
        name: The operator.
        names: Names of its arguments.
        written: The arguments that it writes, with their positions.
        is_proven: Whether the other arguments are passed unchanged.
        rows: Arguments of which only the last dimension has to be dense.
        as_they_are: Arguments that are passed unchanged.
        in_place: If arguments that are read must not overlap with written ones: the exceptions, which may be at exactly
            the same location.
        training: The argument that, if false, makes the operator only read its statistics, with its position.
        limit_bytes: Maximum size of the copies; 0 for no limit.
    """

    name: str
    names: tuple[str, ...]
    written: Mapping[str, int]
    is_proven: bool
    rows: frozenset[str]
    as_they_are: frozenset[str]
    in_place: frozenset[str] | None
    training: tuple[int, str] | None
    limit_bytes: int

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared | None:
        """Return the arguments to call a kernel with in place of the given ones.

        Raises:
            RuntimeError: A written argument overlaps itself, or another written one.
            ProgramTooLargeError: Copies would take too much memory.
        """
        if self.is_proven:
            taken = [value for name, position in self.written.items()
                     if (value := args[position] if position < len(args) else kwargs.get(name)) is not None]
            if _are_contiguous(taken):
                return None
        elif not self.written and _are_contiguous(args) and (not kwargs or _are_contiguous(kwargs.values())):
            return None
        named = (*zip(self.names, args, strict=False), *kwargs.items())
        arranging = _Arranging(self)
        written = self._names_written(args, kwargs)
        made = {name: arranging.write_all(name, value) for name, value in named if name in written}
        if not self.is_proven:
            arranging.expect_apart()
            made.update((name, _each(value, partial(arranging.read, name)))
                        for name, value in named if name not in written)
        if all(made.get(name, value) is value for name, value in named):
            return None
        return Prepared(tuple(made.get(name, value) for name, value in zip(self.names, args, strict=False)),
                        {name: made.get(name, value) for name, value in kwargs.items()}, tuple(arranging.copies))

    def _names_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractSet[str]:
        """Return the arguments that this call writes: statistics are written in some calls and only read in others."""
        if self.training is not None:
            position, name = self.training
            if (args[position] if position < len(args) else kwargs.get(name, True)) is False:
                return {name for name in self.written if not name.startswith("running_")}
        return self.written.keys()


class _Arranging:
    """The operands of one call."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._of = arrangement
        self._ranges: list[tuple[int, int]] = []
        """Address ranges that are written."""
        self._copied_bytes = 0
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Written operands, each with the copy that the kernel writes instead."""

    def write_all(self, name: str, value: Any) -> Any:
        """Return the value to write in place of an argument."""
        if type(value) is list and not self._of.is_proven and _are_contiguous(value):
            for tensor in value:
                unshare(tensor)
            # An empty tensor has no address.
            self._ranges += [(start, start + tensor.nbytes) for tensor in value if (start := address_of(tensor))]
            return value
        return _each(value, partial(self._write, name))

    def _write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        unshare(tensor)
        layout = _layout(tensor)
        expect(layout is not StridedLayout.OVERLAPPING, OVERLAPS_ITSELF)
        if self._of.is_proven:
            return tensor
        if layout is StridedLayout.GAPS and name not in self._of.as_they_are:
            copy = self._copy(tensor)
            self.copies.append((tensor, copy))
            return copy
        if tensor.numel():
            self._ranges.append(_reach(tensor))
        return tensor

    def expect_apart(self) -> None:
        """Check that no memory is written twice."""
        self._ranges.sort()
        expect(all(end <= start for (_, end), (start, _) in pairwise(self._ranges)), OVERLAPS_ANOTHER)

    def read(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to read in place of an operand."""
        if self._ranges and self._is_written(tensor):
            expect(not self._has_to_be_apart(name, tensor), READ_AND_WRITTEN)
            # Otherwise the kernel could overwrite data between checking it and using it.
            return self._copy(tensor)
        if name in self._of.as_they_are or (name in self._of.rows and _has_dense_rows(tensor)):
            return tensor
        return tensor if _layout(tensor) is StridedLayout.DENSE else self._copy(tensor)

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether an element of the tensor may be in memory that is written."""
        if not tensor.numel():
            return False
        low, high = _reach(tensor)
        first = bisect_right(self._ranges, low, key=itemgetter(1))
        return first < len(self._ranges) and self._ranges[first][0] < high

    def _has_to_be_apart(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the kernel would reject this tensor because it writes there; it cannot detect that with gaps."""
        in_place = self._of.in_place
        if in_place is None or _layout(tensor) is not StridedLayout.DENSE:
            return False
        return name not in in_place or _reach(tensor) not in self._ranges

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self._copied_bytes += tensor.numel() * tensor.element_size()
        limit_bytes = self._of.limit_bytes
        if limit_bytes and self._copied_bytes > limit_bytes:
            raise too_large(f"{self._of.name} with copies of operands", self._copied_bytes, 0, limit_bytes)
        return tensor.clone(memory_format=torch.preserve_format)


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and end address of the elements of a non-empty tensor."""
    low = address_of(tensor)
    return low, low + (tensor.nbytes if tensor.is_contiguous() else tensor.element_size() * (1 + sum(
        (extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))))


def _are_contiguous(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            if not value.is_contiguous():
                return False
        elif kind is list or kind is tuple:
            if not _are_contiguous(value):
                return False
        elif isinstance(value, torch.Tensor):
            return False
    return True


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert the tensors of an argument; an unchanged argument remains the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if not isinstance(value, (list, tuple)):
        return value
    made = [change(item) if isinstance(item, torch.Tensor) else item for item in value]
    return value if all(new is old for new, old in zip(made, value, strict=True)) else made


def _has_dense_rows(tensor: torch.Tensor) -> bool:
    return not tensor.dim() or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def arrangement_of(operator: torch._ops.OpOverload, limit_bytes: int) -> Arrangement | None:
    """Return how an operator's operands are handled; ``None`` if they are passed unchanged.

    Args:
        operator: The operator.
        limit_bytes: Maximum size of copies of operands; 0 for no limit.
    """
    proven, written = is_proven(operator), _written(operator)
    if proven and not written:
        return None
    base = base_of(operator)
    rows = [group for group in _rows() if is_as_declared(operator) and base in group.names]
    names = tuple(argument.name for argument in operator._schema.arguments)
    return Arrangement(
        str(operator.name()), names, {name: index for index, name in enumerate(names) if name in written}, proven,
        frozenset().union(*(group.arguments for group in rows)),
        frozenset().union(*(group.as_they_are for group in rows), OWN_CARE.get(operator.namespace, ())),
        _apart().get(base.removesuffix("_")),
        _training_flag(operator), limit_bytes)
