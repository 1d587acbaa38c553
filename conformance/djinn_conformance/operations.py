"""Operators that random programs are made of, each with the form of its arguments.

A form is a list of words, ``name=`` before those that are passed by name: ``t`` a tensor, ``T`` a list of tensors,
``?t`` a tensor or nothing, ``I`` indices (a list of integer tensors, masks or nothing), ``n`` a number, ``f`` a real
number, ``i`` a small integer, ``d`` a dimension, ``D`` some dimensions, ``S`` a size, ``p`` a permutation of the first
tensor's dimensions, ``b`` a bool, ``y`` a dtype, ``Y`` a floating-point dtype, ``M`` a memory format, ``V`` a device;
anything else is itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from djinn.model.schema import facts_of, operator_named

__all__ = ("IN_PLACE", "OPERATIONS", "PLAIN", "RANDOM", "VIEWS", "Operation", "grouped")


@attrs.frozen
class Operation:
    """One operator and the form of its arguments."""

    operator: torch._ops.OpOverload
    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return str(self.operator.name())


_POINTWISE = """
    neg: t
    abs: t
    exp: t
    sin: t
    relu: t
    sigmoid: t
    gelu: t
    clone: t
    logical_not: t
    sgn: t
    add.Tensor: t t alpha=i
    sub.Tensor: t t
    mul.Tensor: t t
    div.Tensor: t t
    div.Tensor_mode: t t rounding_mode=floor
    maximum: t t
    eq.Tensor: t t
    lt.Scalar: t n
    add.Scalar: t n
    mul.Scalar: t n
    rsub.Scalar: t n
    pow.Tensor_Scalar: t i
    clamp: t n None
    where.self: t t t
    lerp.Scalar: t t f
    addcmul: t t t value=n
    masked_fill.Scalar: t t n
    _to_copy: t dtype=Y
    _to_copy: t memory_format=M
    bitwise_xor.Tensor: t t
    complex: t t
    tril: t i
"""
_REDUCTIONS = """
    sum: t
    sum.dim_IntList: t D b
    mean.dim: t D b
    amax: t D b
    any.dim: t d b
    argmax: t d b
    cumsum: t d
    max.dim: t d b
    var_mean.correction: t D correction=i keepdim=b
    topk: t i d
    sort: t d b
    _softmax: t d False
    logsumexp: t D b
    linalg_vector_norm: t i D b
"""
_PRODUCTS = """
    mm: t t
    bmm: t t
    matmul: t t
    addmm: t t t beta=n alpha=n
    linear: t t
    linear: t t ?t
    native_layer_norm: t S ?t ?t f
    native_layer_norm_backward: t t S t t ?t ?t bbb
    scaled_dot_product_attention: t t t
    convolution: t t ?t iS iS iS b iS i
    einsum: ij,jk->ik T
"""
_SHUFFLES = """
    cat: T d
    stack: T d
    flip: t D
    roll: t S D
    repeat: t S
    index.Tensor: t I
    index_select: t d t
    gather: t d t
    embedding: t t
    scatter.value: t d t n
    constant_pad_nd: t S n
    one_hot: t i
    _foreach_mul.Scalar: T n
    _foreach_add.List: T T
    tril_indices: i i
"""
_FACTORIES = """
    zeros: S dtype=y device=V
    ones: S device=V
    full: S n dtype=y device=V
    arange: i dtype=y device=V
    arange.start_step: n n n device=V
    eye: i device=V
    scalar_tensor: n dtype=y device=V
    zeros_like: t dtype=y
    new_zeros: t S
    new_full: t S n
"""
_VIEWS = """
    view: t S
    alias: t
    detach: t
    t: t
    transpose.int: t d d
    permute: t p
    select.int: t d i
    slice.Tensor: t d i None i
    unsqueeze: t d
    squeeze.dim: t d
    squeeze: t
    expand: t S
    diagonal: t i d d
    as_strided: t S S i
    unfold: t d i i
    view_as_real: t
    view_as_complex: t
    _conj: t
    view.dtype: t y
    split.Tensor: t i d
    unbind.int: t d
    split_with_sizes: t S d
    reshape: t S
    _reshape_alias: t S S
    lift_fresh: t
"""
_IN_PLACE = """
    add_.Tensor: t t alpha=i
    sub_.Tensor: t t
    mul_.Tensor: t t
    mul_.Scalar: t n
    addmm_: t t t
    neg_: t
    relu_: t
    zero_: t
    fill_.Scalar: t n
    fill_.Tensor: t t
    copy_: t t
    clamp_min_: t n
    masked_fill_.Scalar: t t n
    index_put_: t I t
    index_add_: t d t t
    scatter_.value: t d t n
    cumsum_: t d
    lerp_.Scalar: t t f
    addcdiv_: t t t value=n
    t_: t
    transpose_: t d d
    squeeze_.dim: t d
    unsqueeze_: t d
    resize_: t S
    add.out: t t out=t
    mm.out: t t out=t
    sum.IntList_out: t D b out=t
    _foreach_add_.Scalar: T n
    _foreach_mul_.List: T T
    _foreach_zero_: T
"""
_RANDOM = """
    randn: S device=V
    rand: S dtype=Y device=V
    randint: i S device=V
    randperm: i device=V
    bernoulli: t
    bernoulli.p: t f
    normal_: t
    uniform_: t
    exponential_: t
    random_: t
    native_dropout: t f True
    multinomial: t i True
    normal.Tensor_Tensor: t t
    rand_like: t
    scaled_dot_product_attention: t t t None 0.5
    poisson: t
"""
_PLAIN = """
    _local_scalar_dense: t
    equal: t t
    is_nonzero: t
    item: t
    allclose: t t
"""


def _read(table: str) -> tuple[Operation, ...]:
    made = []
    for line in filter(None, map(str.strip, table.splitlines())):
        name, _, words = line.partition(": ")
        positional = tuple(word for word in words.split() if "=" not in word)
        keywords = tuple((word.partition("=")[0], word.partition("=")[2]) for word in words.split() if "=" in word)
        made.append(Operation(operator_named(f"aten::{name}"), positional, keywords))
    return tuple(made)


VIEWS = _read(_VIEWS)
"""Results share storage with the first argument."""
IN_PLACE = _read(_IN_PLACE)
"""They write arguments, change their metadata, or both."""
RANDOM = _read(_RANDOM)
"""They draw random numbers."""
PLAIN = _read(_PLAIN)
"""They give Python values."""
OPERATIONS: Mapping[str, tuple[Operation, ...]] = {
    "pointwise": _read(_POINTWISE),
    "reductions": _read(_REDUCTIONS),
    "products": _read(_PRODUCTS),
    "shuffles": _read(_SHUFFLES),
    "factories": _read(_FACTORIES),
    "views": VIEWS,
    "in place": IN_PLACE,
}
"""Deterministic operators that give tensors, by group."""


def grouped(*groups: str) -> tuple[Operation, ...]:
    """List the operations of some groups, or of all."""
    return tuple(operation for name in groups or OPERATIONS for operation in OPERATIONS[name])


def is_random(operation: Operation) -> bool:
    """Whether an operation draws random numbers."""
    return facts_of(operation.operator).is_random
