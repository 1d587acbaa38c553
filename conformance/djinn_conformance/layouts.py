"""Calls recorded from PyTorch's database of operator samples, and memory layouts for their operands."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from djinn.ir.schema import facts_of
from djinn_conformance.database import MOST_ELEMENTS, operators
from djinn_conformance.seeding import quietly
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("LAYOUTS", "Operands", "drawn_calls", "laid_out", "recorded_calls", "unlike", "with_layouts")

_SEED = 20_261
Operands = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Keeps the calls that reach a kernel, with their operands as they were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped there
        self.calls: list[Operands] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, tree = tree_flatten((args, kwargs))
        if all(_is_plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
            copied = tree_unflatten([leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                                     for leaf in leaves], tree)
            self.calls.append((func, *copied))
        return func(*args, **kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS and not (
        tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def recorded_calls(name: str, dtype: torch.dtype = torch.float32, most_samples: int = 12) -> list[Operands]:
    """Record the calls made by the samples of a database entry, forward and backward.

    Args:
        name: Name of the entry; see `djinn_conformance.database.operators`.
        dtype: Dtype of the samples.
        most_samples: How many samples to run.
    """
    entry = operators()[name]
    recorder = _Recorder()
    needs_gradient = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
    with quietly():
        torch.manual_seed(_SEED)
        for _, sample in zip(range(most_samples), entry.sample_inputs("cpu", dtype, requires_grad=needs_gradient),
                             strict=False):
            try:
                with recorder:
                    result = sample.output_process_fn_grad(entry(sample.input, *sample.args, **sample.kwargs))
                    wanted = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)
                              and leaf.requires_grad]
                    if wanted:
                        torch.autograd.backward(wanted, [torch.rand_like(leaf) for leaf in wanted])
            except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
                continue  # The calls recorded before that are sufficient.
    return recorder.calls


def _permuted(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    order = list(range(tensor.dim()))
    choose.shuffle(order)
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def _channels_last(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


def _sliced(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    dim = choose.randrange(tensor.dim())
    return torch.cat([tensor, tensor], dim).narrow(dim, 0, 2 * tensor.size(dim))[
        (*[slice(None)] * dim, slice(None, None, 2))]


def _expanded(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    dim = choose.randrange(tensor.dim())
    return tensor.narrow(dim, 0, 1).expand(tensor.shape)


def _odd(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """Give dimensions of one element strides that no computation would produce."""
    stride = [choose.choice((1, 2, 7, step)) if extent == 1 else step
              for extent, step in zip(tensor.size(), tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.size(), stride, tensor.storage_offset())


LAYOUTS: dict[str, Callable[[torch.Tensor, random.Random], torch.Tensor]] = {
    "contiguous": lambda tensor, choose: tensor,
    "permuted": _permuted,
    "channels_last": _channels_last,
    "sliced": _sliced,
    "expanded": _expanded,
    "odd": _odd,
    "permuted and odd": lambda tensor, choose: _odd(_permuted(tensor, choose), choose),
}


def laid_out(tensor: torch.Tensor, layout: str, choose: random.Random) -> torch.Tensor:
    """Copy a tensor into another memory layout. Only ``expanded`` changes elements; it repeats some."""
    return LAYOUTS[layout](tensor, choose) if tensor.dim() and tensor.numel() else tensor


def with_layouts(call: Operands, choose: random.Random, layouts: Sequence[str] = tuple(LAYOUTS)) -> Operands:
    """Give each operand of a call a drawn layout; written tensors do not overlap themselves."""
    operator, args, kwargs = call
    facts = facts_of(operator)

    def draw(item: Any, is_written: bool) -> Any:
        if isinstance(item, torch.Tensor):
            layout = choose.choice(layouts)
            return laid_out(item, "permuted" if is_written and layout == "expanded" else layout, choose)
        if isinstance(item, (list, tuple)):
            return type(item)(draw(member, is_written) for member in item)
        return item

    named = [draw(item, name in facts.written) for name, item in zip(facts.argument_names, args, strict=False)]
    return operator, tuple(named), {name: draw(item, name in facts.written) for name, item in kwargs.items()}


def unlike(calls: Sequence[Operands]) -> Iterator[Operands]:
    """Yield the calls that differ in more than elements and numbers."""
    seen = set()
    for operator, args, kwargs in calls:
        leaves, _ = tree_flatten((args, kwargs))
        key = (operator.name(), *(
            (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves))
        if key not in seen:
            seen.add(key)
            yield operator, args, kwargs


_ONE = ("neg abs exp log sqrt rsqrt sin cos tanh sigmoid gelu silu erf reciprocal relu square sgn logical_not isfinite "
        "isnan isinf clone _to_copy zeros_like ones_like rand_like randn_like empty_like").split()
_TWO = ("add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor lt.Tensor pow.Tensor_Tensor rsub.Tensor tanh_backward "
        "sigmoid_backward gelu_backward silu_backward").split()
_WITH_NUMBER = ("add.Tensor mul.Tensor sub.Tensor div.Tensor add.Scalar mul.Scalar sub.Scalar div.Scalar rsub.Scalar "
                "eq.Scalar lt.Scalar pow.Tensor_Scalar clamp_min full_like").split()
_THREE = ("where.self", "addcmul", "addcdiv", "lerp.Tensor")
_MASKED = ("native_dropout_backward", "masked_fill.Scalar")
_ALONG = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "sum.dim_IntList",
          "mean.dim", "amax", "cat", "stack", "native_layer_norm")


def drawn_calls(choose: random.Random, count: int) -> Iterator[Operands]:
    """Draw calls accepted by eager, of operators whose result layout depends on their operands' layouts."""
    for _ in range(count):
        size = [choose.choice((1, 1, 2, 3, 4)) for _ in range(choose.randint(1, 5))]
        name = choose.choice(choose.choice((_ONE, _TWO, _TWO, _WITH_NUMBER, _THREE, _MASKED, _ALONG, _ALONG)))
        operator = operator_named(f"aten::{name}")
        args = _arguments(name, size, choose)
        try:
            with torch.no_grad():
                operator(*args)
        except (RuntimeError, NotImplementedError, IndexError):
            continue
        yield operator, args, {}


def _arguments(name: str, size: Sequence[int], choose: random.Random) -> tuple[Any, ...]:
    def tensor() -> torch.Tensor:
        narrow = choose.random() < 0.3
        made = torch.rand([1 if narrow and choose.random() < 0.4 else extent for extent in size])
        laid = laid_out(made, choose.choice(tuple(LAYOUTS)), choose)
        return laid_out(laid, choose.choice(("contiguous", "odd")), choose)

    dim = choose.randrange(len(size))
    if name in _ALONG:
        if name.endswith("backward_data"):
            return tensor(), tensor(), dim, torch.float32
        if "softmax" in name:
            return tensor(), dim, False
        if name == "native_layer_norm":
            return tensor(), list(size[-1:]), None, None, 1e-5
        return ([tensor(), tensor()], dim) if name in ("cat", "stack") else (tensor(), [dim], choose.random() < 0.5)
    if name in _MASKED:
        return tensor(), tensor() > 0.5, 2.0
    if name == "where.self":
        return tensor() > 0.5, tensor(), tensor()
    if name in _WITH_NUMBER and not (name in _TWO and choose.random() < 0.5):
        return tensor(), 2.5
    return tuple(tensor() for _ in range(3 if name in _THREE else 2 if name in _TWO else 1))
