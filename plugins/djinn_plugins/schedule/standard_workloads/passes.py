"""Memory-bound workloads: elementwise, reductions, norms, indexing; and operations that only cost a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from djinn_plugins.schedule.standard_workloads.chains import MAX_CALLS, calls_for, chain, ones, varied
from djinn_plugins.schedule.workloads import Workload

aten = torch.ops.aten
ELEMENTS = (256, 49_152, 393_216)
"""From almost nothing to the size of a layer's result."""
MANY_ELEMENTS = 4_194_304
"""More than caches hold."""
BY_MEMORY = ("relu", "scale", "clone", "gelu", "add", "mul")
"""Operations that are measured with this many elements."""
UNARY: Mapping[str, Callable[[Any], Any]] = MappingProxyType({
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sqrt": torch.sqrt,
    "pow": lambda value: torch.pow(value, 3.0),
    "exp": lambda value: torch.exp(value).neg_(),
    "scale": lambda value: value * 1.0,
    "clone": torch.clone,
})
BINARY: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType({
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "gelu backward": aten.gelu_backward.default,
    "relu backward": lambda value, other: aten.threshold_backward.default(value, other, 0),
})
JOINING: Mapping[str, Callable[[Any], Any]] = MappingProxyType({"cat": torch.cat, "stack": torch.stack})
UPDATES: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType({
    "add in place": lambda value, other: value.add_(other, alpha=0.0),
    "scale in place": lambda value, other: value.mul_(1.0),
    "lerp in place": lambda value, other: value.lerp_(other, 0.1),
    "addcmul in place": lambda value, other: value.addcmul_(other, other, value=0.0),
    "addcdiv in place": lambda value, other: value.addcdiv_(other, other, value=0.0),
})
"""Operations of optimizers on each parameter and its state."""
UPDATED = (256, 36_864, 147_456)
ROWS = ((2, 64), (64, 768), (512, 192), (2048, 768))


def workloads() -> Iterator[Workload]:
    """Yield the workloads."""
    yield from _views()
    for elements in (*ELEMENTS, MANY_ELEMENTS):
        for name, unary in UNARY.items():
            if elements in ELEMENTS or name in BY_MEMORY:
                yield _unary(name, elements, unary)
        for name, binary in BINARY.items():
            if elements in ELEMENTS or name in BY_MEMORY:
                yield _binary(name, elements, binary)
    for elements in ELEMENTS:
        for name, joining in JOINING.items():
            yield _joining(name, elements, joining)
    for elements in UPDATED:
        for name, update in UPDATES.items():
            yield _update(name, elements, update)
    for rows, width in ROWS:
        yield from _norms(rows, width)
        yield from _reductions(rows, width)
    for channels, width in ((2, 4), (64, 56), (256, 14), (64, 112)):
        yield from _of_images(channels, width)
    for rows, width in ((4, 8), (64, 768), (512, 192)):
        yield from _by_index(rows, width)


def _views() -> Iterator[Workload]:
    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return ones(device, 4, 4), [None]

    yield chain("view", MAX_CALLS, make, lambda value, _: value.view(16).view(4, 4))
    yield chain("transpose", MAX_CALLS, make, lambda value, _: value.transpose(0, 1))
    yield chain("t", MAX_CALLS, make, lambda value, _: value.t())
    yield chain("slice", MAX_CALLS, make, lambda value, _: value[0:4])
    yield chain("detach", MAX_CALLS, make, lambda value, _: value.detach())
    yield chain("permute", MAX_CALLS, make, lambda value, _: value.permute(1, 0))
    yield chain("select and unsqueeze", MAX_CALLS, make, lambda value, _: value.unsqueeze(0)[0])


def _unary(name: str, elements: int, function: Callable[[Any], Any]) -> Workload:
    return chain(f"{name} {elements}", calls_for(8 * elements), lambda device: (ones(device, elements), [None]),
                 lambda value, _: function(value))


def _binary(name: str, elements: int, function: Callable[[Any, Any], Any]) -> Workload:
    return chain(f"{name} {elements}", calls_for(12 * elements),
                 lambda device: (ones(device, elements), [ones(device, elements)]), function)


def _joining(name: str, elements: int, function: Callable[[Any], Any]) -> Workload:
    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return (), [[ones(device, elements // 2), ones(device, elements // 2)]]

    return chain(f"{name} {elements}", calls_for(8 * elements), make,
                 lambda kept, operand: (*kept, function(operand)))


def _update(name: str, elements: int, function: Callable[[Any, Any], Any]) -> Workload:
    """Update tensors one after another."""
    calls = 30

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return (), [(ones(device, elements), ones(device, elements)) for _ in range(calls)]

    return chain(f"{name} {elements}", calls, make, lambda updated, operand: (*updated, function(*operand)))


def _norms(rows: int, width: int) -> Iterator[Workload]:
    size_bytes = 8 * rows * width

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        value = ones(device, rows, width) + torch.arange(width, device=device) / width
        statistics = ones(device, rows, 1, value=0.5), ones(device, rows, 1)
        return value, [(value, statistics, ones(device, width), ones(device, width, value=0.0))]

    def native(value: Any, operand: Any) -> Any:
        return aten.native_layer_norm.default(value, (width,), *operand[2:], 1e-5)[0]

    def backward(value: Any, operand: Any) -> Any:
        given, statistics, weight, bias = operand
        made = aten.native_layer_norm_backward.default(value, given, (width,), *statistics, weight, bias,
                                                       [True, True, True])
        return made[0]

    def whole(value: Any, operand: Any) -> Any:
        return functional.layer_norm(value, (width,), *operand[2:])

    def roots(value: Any, operand: Any) -> Any:
        return functional.rms_norm(value, (width,), operand[2])

    yield chain(f"layer norm {rows}x{width}", calls_for(size_bytes), make, whole)
    yield chain(f"native layer norm {rows}x{width}", calls_for(size_bytes), make, native)
    yield chain(f"layer norm backward {rows}x{width}", calls_for(size_bytes), make, backward)
    yield chain(f"rms norm {rows}x{width}", calls_for(size_bytes), make, roots)


def _reductions(rows: int, width: int) -> Iterator[Workload]:
    calls = calls_for(4 * rows * width)

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return ones(device, rows, width, value=0.5), [ones(device, rows, width)]

    def gathered(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda kept, operand: (*kept, function(operand))

    def empty(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return (), make(device)[1]

    yield chain(f"sum of columns {rows}x{width}", calls, empty, gathered(lambda value: value.sum(0, keepdim=True)))
    yield chain(f"mean of rows {rows}x{width}", calls, empty, gathered(lambda value: value.mean(-1)))
    yield chain(f"softmax {rows}x{width}", calls, make, lambda value, _: functional.softmax(value, -1))
    yield chain(f"log softmax {rows}x{width}", calls, make, lambda value, _: functional.log_softmax(value, -1))


def _of_images(channels: int, width: int) -> Iterator[Workload]:
    calls = calls_for(8 * channels * width * width)

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return varied(device, 1, channels, width, width), [[ones(device, channels) for _ in range(4)]]

    def norm(value: Any, operand: Any) -> Any:
        return functional.batch_norm(value, *operand)

    def norm_backward(value: Any, operand: Any) -> Any:
        weight, mean, variance, other = operand
        return aten.native_batch_norm_backward.default(value, value, weight, mean, variance, other, other, True, 1e-5,
                                                       [True, True, True])[0]

    def pooled(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return (), [make(device)[0]]

    def pool(kept: Any, operand: Any) -> Any:
        return *kept, functional.max_pool2d(operand, 3, stride=2, padding=1)

    yield chain(f"batch norm 1x{channels}x{width}x{width}", calls, make, norm)
    yield chain(f"batch norm backward 1x{channels}x{width}x{width}", calls, make, norm_backward)
    yield chain(f"max pool 1x{channels}x{width}x{width}", calls, pooled, pool)


def _by_index(rows: int, width: int) -> Iterator[Workload]:
    table_rows = 4 * rows
    calls = calls_for(8 * rows * width)

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        # An odd step through the table visits every row, and never after its neighbour.
        index = torch.arange(rows, device=device) * 1_000_003 % table_rows
        return (), [(ones(device, table_rows, width), index, ones(device, rows, width))]

    def embedding(kept: Any, operand: Any) -> Any:
        return *kept, functional.embedding(operand[1], operand[0])

    def gather(kept: Any, operand: Any) -> Any:
        return *kept, torch.index_select(operand[0], 0, operand[1])

    def backward(kept: Any, operand: Any) -> Any:
        return *kept, aten.embedding_dense_backward.default(operand[2], operand[1], table_rows, -1, False)

    yield chain(f"embedding {rows}x{width}", calls, make, embedding)
    yield chain(f"index select {rows}x{width}", calls, make, gather)
    yield chain(f"embedding backward {rows}x{width}", max(4, calls // 4), make, backward)
