"""Overflow-safe checks of sizes and strides, for operators that make views or allocate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import comb, prod
from typing import Any

import torch

from djinn.ir.schema import ReturnKind, facts_of
from djinn_plugins.guard.kernels import Rule
from djinn_plugins.guard.preconditions import Named, expect, expect_as_eager, extent_bytes, has_elements, within

__all__ = ("MAX_RESULTS", "RESULT_BYTES", "size_rule")

LARGEST_ITEM_BYTES = 16
MAX_RESULTS = 2**16
"""Maximum number of tensors in the result of one call."""
_LIMIT = 2**63


def _product(numbers: Any) -> int:
    return prod(number for number in numbers if number > 0)


def _fits(size: Any, *, elements: int = 1) -> None:
    if isinstance(size, int):
        size = [size]
    expect(_product(size) * max(elements, 1) * LARGEST_ITEM_BYTES < _LIMIT, f"the size {list(size)} overflows")


def _lays_out(size: Any, *, is_new: bool = False) -> None:
    """Check the size of what is laid out: PyTorch leaves a tensor with negative extents, and raises afterwards."""
    least = min(size, default=0)
    said = f"Trying to create tensor with negative dimension {least}: {list(size)}"
    expect_as_eager(least >= 0, said if is_new else "numel: integer multiplication overflow")
    _fits(size)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _as_strided(named: Named) -> None:
    tensor, offset = named["self"], named.get("storage_offset")
    start = tensor.storage_offset() if offset is None else offset
    reach = extent_bytes(named["size"], named["stride"], start, tensor.element_size())
    there = _storage_bytes(tensor)
    # aten/src/ATen/native/Resize.h, setStrided.
    expect_as_eager(
        prod(named["size"]) < _LIMIT and reach <= there,
        f"setStorage: sizes {list(named['size'])}, strides {list(named['stride'])}, storage offset {start}, and "
        f"itemsize {tensor.element_size()} requiring a storage size of {reach} are out of bounds for storage of "
        f"size {there}")


def _as_strided_scatter(named: Named) -> None:
    offset = named.get("storage_offset") or 0
    reach = extent_bytes(named["size"], named["stride"], offset, named["self"].element_size())
    fits = prod(named["size"]) < _LIMIT and reach <= _storage_bytes(named["self"])
    expect(fits, "the view reaches beyond its storage")


def _laid_out(named: Named) -> None:
    """Check storage that grows with a view of it: new storage, or storage assigned to another tensor."""
    stride = named["stride"]
    size = named["size"]
    _lays_out(size, is_new="source" not in named)
    if len(stride) == len(size):
        reach = extent_bytes(size, stride, named.get("storage_offset") or 0, LARGEST_ITEM_BYTES)
        expect(reach < _LIMIT, f"sizes {list(size)} and strides {list(stride)} overflow")


def _set_to(named: Named) -> None:
    """Check a tensor that is given another one's storage: PyTorch makes no room if size and strides are the same."""
    _laid_out(named)
    tensor, source = named["self"], named["source"]
    size, stride = list(named["size"]), list(named["stride"])
    if size == list(tensor.shape) and stride in ([], list(tensor.stride())):
        start = source.storage_offset() + named["storage_offset"]
        reach = extent_bytes(size, tensor.stride(), start, tensor.element_size())
        expect(reach <= _storage_bytes(source), f"{reach} bytes of a storage of {_storage_bytes(source)}")


def _sized(named: Named) -> None:
    """Check the size of new values: a kernel that writes them to an ``out`` lays that out before it counts them."""
    (_fits if named.get("out") is None else _lays_out)(named["size"])


def _viewed(named: Named) -> None:
    """Check a size in which -1 stands for what is left."""
    _fits(named["size"])


def _resized(named: Named) -> None:
    """Check that a tensor whose strides become dense has room for that: PyTorch makes none if its size is the same."""
    tensor, template = named["self"], named.get("the_template")
    size = list(named["size"] if template is None else template.shape)
    _lays_out(size)
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    expect(named["memory_format"] is None or list(tensor.shape) != size or needed <= _storage_bytes(tensor),
           f"{tensor.numel()} elements in a storage of {_storage_bytes(tensor)} bytes")


def _binned(named: Named) -> None:
    """Check that the edges can be counted; the kernel resizes `out` to one more than the bins before any error."""
    bins = named["bins"]
    counts = [bins] if isinstance(bins, int) else [count for count in bins if isinstance(count, int)]
    _fits([count + 1 for count in counts])


def _expanded(named: Named) -> None:
    size, old = list(named["size"]), list(named["self"].shape)
    shape = [extent if extent >= 0 else 1 for extent in size]
    expect(prod(filter(None, shape)) * prod(filter(None, old)) < _LIMIT or prod(filter(None, shape)) < _LIMIT // 16,
           f"the size {size} overflows")


def _repeated(named: Named) -> None:
    _fits(named["repeats"], elements=named["self"].numel())


def _unfolded(named: Named) -> None:
    tensor = named["self"]
    step = max(tensor.stride(), default=1) * max(abs(named["step"]), 1)
    expect(step < _LIMIT, f"windows every {named['step']} elements overflow")


def _listed(count: Callable[[Named], int]) -> Rule:
    def rule(named: Named) -> None:
        made = count(named)
        expect(made <= MAX_RESULTS, f"a list of {made} tensors; {MAX_RESULTS} is the limit")

    return rule


def _extent(named: Named, dim: int) -> int:
    tensor = named["self"]
    return int(tensor.shape[dim]) if -tensor.dim() <= dim < tensor.dim() else 0


def _pieces(named: Named) -> int:
    given = named.get("split_size", named.get("split_sizes"))
    if isinstance(given, (list, tuple)):
        return len(given)
    extent = _extent(named, named["dim"])
    return -(-extent // given) if given > 0 else 0


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("as_strided", "as_strided_", "as_strided_copy", "_reshape_alias", "_reshape_alias_copy"),
                    _as_strided),
    "as_strided_scatter": _as_strided_scatter,
    **dict.fromkeys(("empty_strided", "new_empty_strided"), _laid_out),
    **dict.fromkeys(("resize_", "resize_as_"), _resized),
    **dict.fromkeys(("expand", "expand_copy", "broadcast_to"), _expanded),
    **dict.fromkeys(("_reshape_copy", "_unsafe_view", "view_copy", "sum_to_size"), _viewed),
    "repeat": _repeated,
    **dict.fromkeys(("histogram", "histogramdd", "histc", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts"),
                    _binned),
    "tile": lambda named: _fits(named["dims"], elements=named["self"].numel()),
    **dict.fromkeys(("unfold", "unfold_copy"), _unfolded),
    **dict.fromkeys(("unbind", "unbind_copy"), _listed(lambda named: _extent(named, named["dim"]))),
    **dict.fromkeys(("split", "unsafe_split", "split_copy"), _listed(_pieces)),
    **dict.fromkeys(("chunk", "unsafe_chunk"), _listed(lambda named: min(
        named["chunks"], max(_extent(named, named["dim"]), 1)))),
    **dict.fromkeys(("tensor_split", "hsplit", "vsplit", "dsplit"), _listed(lambda named: max(
        (item for item in named.values() if type(item) is int), default=0))),
}


def _is_factory(operator: torch._ops.OpOverload) -> bool:
    facts = facts_of(operator)
    makes_one = facts.returns == (ReturnKind.TENSOR,) and facts.aliases == (None,)
    return (makes_one or "out" in facts.written) and any(
        argument.name == "size" and str(argument.type) == "List[int]" for argument in operator._schema.arguments)


def size_rule(operator: torch._ops.OpOverload, base: str) -> Rule | None:
    """Return the rule for the sizes of a call; ``None`` if they can do no harm.

    Args:
        operator: The overload.
        base: Its name without namespace and overload.
    """
    if base == "set_":
        return _set_to if operator._overloadname == "source_Tensor_storage_offset" else None
    found = _RULES.get(base)
    if found is None and _is_factory(operator):
        return _sized
    return found


def _repeat_interleave(named: Named) -> int:
    repeats = named["repeats"]
    if isinstance(repeats, int) or not repeats.numel() or not has_elements(repeats):
        return 0
    within(named, "repeats", 0, 2**40)
    source = named.get("self")
    each = 1 if source is None else max(source.numel() // repeats.numel(), 1)
    return int(repeats.sum()) * each * 8


def _classes(tensor: torch.Tensor) -> int:
    return int(tensor.max()) + 1 if tensor.numel() and has_elements(tensor) else 0


def _bincount(named: Named) -> int:
    tensor = named["self"]
    return 8 * max(_classes(tensor), int(named["minlength"]))


def _one_hot(named: Named) -> int:
    tensor, classes = named["self"], int(named["num_classes"])
    if classes < 0:
        classes = _classes(tensor)
    return int(8 * tensor.numel() * max(classes, 0))


def _combinations(named: Named) -> int:
    count, taken = named["self"].numel(), max(int(named["r"]), 0)
    if taken > 64:
        return 0 if count < taken and not named["with_replacement"] else _LIMIT
    return int(max(count**taken, comb(count, taken) * taken * 8))


RESULT_BYTES: Mapping[str, Callable[[Named], int]] = {
    "repeat_interleave": _repeat_interleave,
    "bincount": _bincount,
    "one_hot": _one_hot,
    "combinations": _combinations,
}
"""Bytes that a call will allocate, where they depend on the elements of an argument, or exceed its result."""
