"""Compute-bound workloads: matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from djinn_plugins.schedule.standard_workloads.chains import MAX_CALLS, RUN_FLOPS, calls_for, chain, ones, varied
from djinn_plugins.schedule.workloads import Workload

aten = torch.ops.aten
STREAMED_BYTES = 600e6
"""Total size of weights that a decoder reads once for each token: more than the largest caches of processors hold."""
COLD_BYTES = 96e6
"""Total size of weights that are read in rotation, too large to stay cached between uses, as in a large model."""
WARM_BYTES = 12e6
"""The same for a small model: each weight is read a few times before it is evicted."""
PRODUCTS = ((1, 768, 768), (1, 768, 3072), (8, 768, 768), (64, 768, 768), (64, 768, 3072), (512, 192, 192),
            (512, 192, 768), (512, 768, 768))
"""Rows, and the two sizes of the weights."""
CONVOLUTIONS = ((1, 64, 56, 3, 1), (1, 128, 28, 3, 1), (1, 256, 14, 3, 1), (1, 512, 7, 3, 1), (1, 64, 56, 1, 1),
                (1, 256, 14, 1, 1), (1, 64, 56, 3, 2), (1, 256, 14, 3, 2), (8, 64, 28, 3, 1))
"""Images, channels, width of an image, of the kernel, and its stride."""
ATTENTIONS = ((1, 12, 64, 64, 64), (1, 12, 1, 64, 64), (1, 12, 1, 512, 64), (8, 6, 64, 64, 32), (1, 12, 256, 256, 64))
"""Sequences, heads, queries, keys, width of a head."""
WITH_BIAS = frozenset({"linear", "addmm"})


def workloads() -> Iterator[Workload]:
    """Yield the workloads."""
    for size in PRODUCTS:
        for name in ("linear", "addmm"):
            yield _product(name, *size, _distinct_bytes(size[0]))
    yield _product("linear", 64, 768, 12_288, COLD_BYTES)
    for rows, inner, outer in ((512, 192, 192), (64, 768, 768), (192, 512, 768)):
        yield _product("mm", rows, inner, outer, WARM_BYTES)
        yield _product("matmul", rows, inner, outer, WARM_BYTES)
    for name in ("linear", "addmm", "mm", "matmul"):
        yield _product(name, 1, 16, 16, 1e3)
    for batch, rows, width in ((12, 64, 64), (48, 64, 32), (12, 384, 64), (2, 4, 4)):
        yield _batched(batch, rows, width)
    for shape in CONVOLUTIONS:
        yield _convolution(*shape)
        yield _convolution_backward(*shape)
    yield _first_convolution()
    for attention in ATTENTIONS:
        yield _attention(*attention)
    for backward in (ATTENTIONS[0], ATTENTIONS[3], ATTENTIONS[4]):
        yield from _attention_backward(*backward)


def _distinct_bytes(rows: int) -> float:
    """Return the total size of the weights: the fewer the rows, the more of the time goes into reading weights."""
    return STREAMED_BYTES if rows == 1 else COLD_BYTES if rows < 512 else WARM_BYTES


def _product(name: str, rows: int, inner: int, outer: int, distinct_bytes: float) -> Workload:
    """Multiply by weights of one shape, and back by weights of the transposed shape."""
    weight_bytes = 4 * inner * outer
    pairs = max(1, int(distinct_bytes / weight_bytes / 2))
    has_bias = name in WITH_BIAS
    function: Callable[..., Any] = getattr(functional if name == "linear" else torch, name)

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        operands = []
        for wide, narrow in [(inner, outer), (outer, inner)] * pairs:
            weight = ones(device, wide, narrow, value=1 / wide)
            weight = ones(device, narrow, wide, value=1 / wide) if name == "linear" else weight
            operands.append((weight, ones(device, narrow, value=0.0) if has_bias else None))
        value = ones(device, rows, inner)
        return value if name != "matmul" else value[None], operands

    def step(value: Any, operand: Any) -> Any:
        weight, bias = operand
        if name == "linear":
            return function(value, weight, bias)
        return function(bias, value, weight) if has_bias else function(value, weight)

    flops = 2 * rows * inner * outer
    calls = 2 if flops > RUN_FLOPS else max(calls_for(weight_bytes, flops), min(pairs, MAX_CALLS) if rows == 1 else 2)
    return chain(f"{name} {rows}x{inner}x{outer}", calls + calls % 2, make, step)


def _batched(batch: int, rows: int, width: int) -> Workload:
    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return ones(device, batch, rows, width), [ones(device, batch, width, width, value=1 / width)]

    flops = 2 * batch * rows * width * width
    return chain(f"bmm {batch}x{rows}x{width}", calls_for(8 * batch * rows * width, flops), make, torch.bmm)


def _convolution(images: int, channels: int, width: int, kernel: int, stride: int) -> Workload:
    """Convolve; if that makes images smaller, always the same ones."""
    flops = 2 * images * (width // stride) ** 2 * channels * channels * kernel * kernel
    weight_value = 1 / (channels * kernel * kernel)

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        image = varied(device, images, channels, width, width)
        weights = [ones(device, channels, channels, kernel, kernel, value=weight_value) for _ in range(4)]
        return image, [(image, weight) for weight in weights]

    def step(value: Any, operand: Any) -> Any:
        image, weight = operand
        if stride == 1:
            return functional.conv2d(value, weight, padding=kernel // 2)
        # One element of the previous result keeps that result alive until here.
        made = functional.conv2d(image, weight, stride=stride, padding=kernel // 2)
        return made if value is image else made.add_(value[0, 0, 0, 0])

    return chain(f"convolution {images}x{channels}x{width}x{width} {kernel}x{kernel} step {stride}",
                 calls_for(8 * images * channels * width**2, flops), make, step)


def _first_convolution() -> Workload:
    """Convolve an image of three colours, like the first layer of a network."""

    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        return None, [(varied(device, 1, 3, 224, 224), ones(device, 64, 3, 7, 7, value=1 / 147))]

    def step(value: Any, operand: Any) -> Any:
        image, weight = operand
        made = functional.conv2d(image, weight, stride=2, padding=3)
        return made if value is None else made.add_(value[0, 0, 0, 0])

    return chain("convolution 1x3x224x224 7x7 step 2", 4, make, step)


def _convolution_backward(images: int, channels: int, width: int, kernel: int, stride: int) -> Workload:
    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        weight = ones(device, channels, channels, kernel, kernel, value=1 / (channels * kernel * kernel))
        out = (width - 1) // stride + 1
        return None, [(ones(device, images, channels, out, out), ones(device, images, channels, width, width), weight)]

    def step(value: Any, operand: Any) -> Any:
        gradient, image, weight = operand
        if value is not None:
            gradient = value[0] if stride == 1 else gradient
        made = aten.convolution_backward(gradient, image, weight, None, [stride] * 2, [kernel // 2] * 2, [1, 1], False,
                                         [0, 0], 1, [True, True, False])
        return made[:2] if value is None or stride == 1 else (made[0], made[1].add_(value[1]))

    flops = 4 * images * (width // stride) ** 2 * channels * channels * kernel * kernel
    return chain(f"convolution backward {images}x{channels}x{width}x{width} {kernel}x{kernel} step {stride}",
                 max(4, calls_for(8 * images * channels * width**2, flops) // 2), make, step)


def _heads(device: torch.device, batch: int, heads: int, length: int, width: int) -> torch.Tensor:
    """Create heads as a model has them: slices of one projection."""
    return ones(device, batch, length, heads * width).view(batch, length, heads, width).transpose(1, 2)


def _attention(batch: int, heads: int, queries: int, keys: int, width: int) -> Workload:
    def make(device: torch.device) -> tuple[Any, Sequence[Any]]:
        key = _heads(device, batch, heads, keys, width)
        return _heads(device, batch, heads, queries, width), [(key, key.clone())]

    def step(value: Any, operand: Any) -> Any:
        key, other = operand
        return functional.scaled_dot_product_attention(value, key, other, is_causal=queries == keys)

    flops = 4 * batch * heads * queries * keys * width
    return chain(f"attention {batch}x{heads}x{queries}x{keys}x{width}",
                 calls_for(8 * batch * heads * keys * width, flops), make, step)


def _attention_backward(batch: int, heads: int, queries: int, keys: int, width: int) -> Iterator[Workload]:
    """Differentiate attention with autograd: the operator for that depends on the device."""

    def prepare(device: torch.device) -> Callable[[], Any]:
        operands = [_heads(device, batch, heads, length, width).detach().requires_grad_()
                    for length in (queries, keys, keys)]
        gradient = _heads(device, batch, heads, queries, width)
        with torch.enable_grad():
            query, key, value = operands
            result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        def run() -> Any:
            with torch.enable_grad():
                return [torch.autograd.grad(result, operands, gradient, retain_graph=True) for _ in range(2)]

        return run

    yield Workload(f"attention backward {batch}x{heads}x{queries}x{keys}x{width}", prepare)
