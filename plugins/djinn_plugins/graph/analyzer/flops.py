"""Floating-point operations of a call, by formula.

The count covers the same operations as PyTorch's own counter: matrix products, convolutions and attention, with a
multiply-add as two. Its formulas are used where it has one. It sees composites decomposed, whereas djinn records them
whole, so they have formulas here. Kernels that it does not know also have formulas here, which follow its rule for
related kernels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.analyzer.calls import OperatorCall, Shape, bind, on_meta
from djinn_plugins.graph.analyzer.facts import OperatorFacts
from djinn_plugins.graph.graph import GraphNode

_log = logging.getLogger("djinn.analyzer")


def count_flops(
    facts: OperatorFacts,
    node: GraphNode,
    operands: Sequence[TensorSpec | None],
    results: Sequence[TensorSpec | None],
) -> int:
    """Count the floating-point operations of a node.

    Args:
        facts: Its operator.
        node: The node.
        operands: Metadata of its inputs.
        results: Metadata of its outputs.
    """
    if facts.operator is None or not has_formula(facts.operator, facts.name):
        return 0
    registered = _registered(facts.operator, facts.name)
    try:
        call = bind(facts, node, operands, results)
        return int(FORMULAS[facts.name](call) if registered is None else _by_registry(registered, call))
    except Exception as problem:  # noqa: BLE001  # formulas may come from anyone: PyTorch has a decorator for them
        _log.debug("No count for %s: %s", node.operation, problem)
        return 0


def has_formula(operator: torch._ops.OpOverload | None, name: str) -> bool:
    """Whether calls of an operator may cost anything."""
    return name in FORMULAS or (operator is not None and _registered(operator, name) is not None)


def _registered(operator: torch._ops.OpOverload, name: str) -> Callable[..., Any] | None:
    from torch.utils.flop_counter import flop_registry

    found = flop_registry.get(operator._overloadpacket)
    if found is None and operator._schema.name.endswith("_"):
        # The formula is registered for the operator that does the same without writing in place.
        found = flop_registry.get(getattr(getattr(torch.ops, operator.namespace), name, None))
    made: Callable[..., Any] | None = found
    return made


def _by_registry(formula: Callable[..., Any], call: OperatorCall) -> int:
    """Apply PyTorch's formula, which takes tensors or their shapes."""
    positional, named = call.on_meta()
    results = [on_meta(spec) for spec in call.results]
    return int(formula(*positional, **named, out_val=results[0] if len(results) == 1 else tuple(results)))


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


def _linear(call: OperatorCall) -> int:
    return 2 * call.elements * call.shape("input")[-1]


def _product(call: OperatorCall) -> int:
    """Count a product with rows of ``self``: each element of the result is one sum over its last dimension."""
    return 2 * call.elements * call.shape("self")[-1]


def _matrix_vector(call: OperatorCall) -> int:
    return 2 * math.prod(call.shape("mat"))


def _addmm(call: OperatorCall) -> int:
    return 2 * call.elements * call.shape("mat1")[-1]


def _addbmm(call: OperatorCall) -> int:
    return 2 * math.prod(call.shape("batch1")) * call.shape("batch2")[-1]


def _contraction(call: OperatorCall, left: str = "self", right: str = "other") -> int:
    """Count a product of two tensors without common free dimensions, for any dimensions that are summed over."""
    first, second = math.prod(call.shape(left)), math.prod(call.shape(right))
    return 2 * math.isqrt(first * second * call.elements)


def _grouped_mm(call: OperatorCall) -> int:
    """Count grouped products: the operand that is split into groups is processed once, not once per group."""
    left, right = call.shape("self"), call.shape("mat2")
    if len(left) == len(right) == 3:
        return 2 * math.prod(left) * right[-1]
    return 2 * left[-2] * left[-1] * right[-1]


def _convolution(call: OperatorCall) -> int:
    weight = call.shape("weight")
    positions = call.elements // (call.out[1] if len(call.out) == len(weight) else call.out[0])
    return 2 * positions * math.prod(weight)


def _transposed_convolution(call: OperatorCall) -> int:
    given, weight = call.shape("input"), call.shape("weight")
    positions = math.prod(given) // (given[1] if len(given) == len(weight) else given[0])
    return 2 * positions * math.prod(weight)


def _conv_tbc(call: OperatorCall) -> int:
    return 2 * _rows(call.out) * math.prod(call.shape("weight"))


def _attention(call: OperatorCall) -> int:
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    return 2 * _rows(query) * key[-2] * (query[-1] + value[-1])


def _attention_backward(call: OperatorCall) -> int:
    """Count the scores once more, then two products for each of the two of the forward pass."""
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    return 2 * _rows(query) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _layers(call: OperatorCall) -> int:
    """Count recurrent layers: each matrix once for each element of each sequence."""
    given = call.shape("data" if "data" in call.arguments else "input")
    weights = [*call.shapes("params"), *call.shapes("weight"), *call.shapes("weights")]
    weights += [call.shape(name) for name in ("weight0", "weight1") if name in call.arguments]
    return 2 * _rows(given) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _cell(call: OperatorCall) -> int:
    return 2 * _rows(call.shape("input")) * (math.prod(call.shape("w_ih")) + math.prod(call.shape("w_hh")))


def _bilinear(call: OperatorCall) -> int:
    return 2 * _rows(call.shape("input1")) * math.prod(call.shape("weight"))


def _own_attention(call: OperatorCall, given: str = "query") -> int:
    """Count attention with its projections, as `torch.nn.MultiheadAttention` calls it for inference."""
    query = call.shape(given)
    length = (call.shape("key") if given == "query" else query)[-2]
    return 2 * _rows(query) * query[-1] * (4 * query[-1] + 2 * length)


def _encoder_layer(call: OperatorCall) -> int:
    inner = math.prod(call.shape("ffn_weight_1")) + math.prod(call.shape("ffn_weight_2"))
    return _own_attention(call, "src") + 2 * _rows(call.shape("src")) * inner


def _einsum(call: OperatorCall) -> int:
    """Contract from left to right; a pair without a common dimension to sum over needs no matrix product."""
    terms, arrow, result = str(call.arguments["equation"]).replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    operands: list[set[str]] = []
    for term, shape in zip(terms.split(","), call.shapes("tensors"), strict=True):
        labels = _labels(term, len(shape))
        sizes.update((label, max(size, sizes.get(label, 1))) for label, size in zip(labels, shape, strict=True))
        operands.append(set(labels))
    every = [label for operand in operands for label in operand]
    # Without an arrow, labels that occur once are kept, and all dimensions of an ellipsis.
    kept = set(_labels(result, len(call.out))) if arrow else {
        label for label in every if every.count(label) == 1 or label.startswith("...")}
    total, left = 0, operands[0]
    for position, right in enumerate(operands[1:], 2):
        later = kept.union(*operands[position:])
        summed = (left & right) - later
        both = {label for label in left | right if label in later or label in summed}
        total += 2 * math.prod(sizes[label] for label in both) if summed else 0
        left = both - summed
    return total


def _labels(term: str, dimensions: int) -> list[str]:
    """Return the labels of one term's dimensions; those of an ellipsis are counted from its right end."""
    before, ellipsis, after = term.partition("...")
    hidden = dimensions - len(before) - len(after) if ellipsis else 0
    return [*before, *(f"...{hidden - place}" for place in range(hidden)), *after]


FORMULAS: Mapping[str, Callable[[OperatorCall], int]] = MappingProxyType({
    "linear": _linear,
    "matmul": _product,
    **dict.fromkeys(("_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm"), _product),
    "mv": lambda call: 2 * math.prod(call.shape("self")),
    "addmv": _matrix_vector,
    **dict.fromkeys(("dot", "vdot"), lambda call: 2 * math.prod(call.shape("self"))),
    "_addmm_activation": _addmm,
    "addbmm": _addbmm,
    **dict.fromkeys(("tensordot", "inner"), _contraction),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped_mm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "_convolution_mode", "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "conv_tbc": _conv_tbc,
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_attention_math",
                     "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_flash_attention_for_cpu",
                     "_scaled_dot_product_fused_attention_overrideable"), _attention),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu_backward",
                     "_scaled_dot_product_fused_attention_overrideable_backward"), _attention_backward),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "mkldnn_rnn_layer"), _layers),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
    "bilinear": _bilinear,
    "_native_multi_head_attention": _own_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "einsum": _einsum,
})
"""By plain name: operators that PyTorch's counter does not know."""
