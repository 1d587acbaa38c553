"""The operators of random programs, each with the form of its arguments.

A form is a list of words, ``name=`` before those that are passed by name: ``t`` a tensor, ``s`` one of the first's size
and dtype, ``x`` one of real numbers, ``c`` one of complex numbers, ``l`` one of 64-bit integers, ``m`` a mask, ``w``
one that the first can be multiplied with, ``v`` one that fits the first's last dimension, ``?`` before a word that may
be nothing, ``T`` a list of like tensors, ``I`` indices (integer tensors, masks or nothing), ``n`` a number, ``f`` a
real number, ``i`` a small integer, ``k`` one that is not negative, ``d`` a dimension, ``D`` some dimensions, ``S`` a
size, ``Z`` the first's own size, ``L`` the size of its last dimension, ``p`` a permutation of its dimensions, ``b`` a
bool, ``y`` a dtype, ``Y`` a floating-point dtype, ``M`` a memory format, ``V`` a device; anything else is itself. If
nothing fits a word, any tensor is used: PyTorch then refuses the call, and it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from djinn.ir.schema import facts_of
from djinn_plugins.common.operators.operators import operator_named

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
    exp: x
    sin: x
    relu: t
    sigmoid: x
    gelu: x
    clone: t
    logical_not: t
    sgn: t
    add.Tensor: t s alpha=i
    sub.Tensor: x t
    mul.Tensor: t s
    div.Tensor: x s
    div.Tensor_mode: x s rounding_mode=floor
    maximum: x s
    eq.Tensor: t s
    lt.Scalar: t n
    add.Scalar: t n
    mul.Scalar: t n
    rsub.Scalar: t n
    pow.Tensor_Scalar: t k
    clamp: t n None
    where.self: m t t
    lerp.Scalar: x s f
    addcmul: t s s value=k
    masked_fill.Scalar: t m n
    _to_copy: t dtype=Y
    _to_copy: t memory_format=M
    bitwise_xor.Tensor: l l
    complex: x s
    tril: t i
"""
_REDUCTIONS = """
    sum: t
    sum.dim_IntList: t D b
    mean.dim: x D b
    amax: x D b
    any.dim: t d b
    argmax: x d b
    cumsum: t d
    max.dim: x d b
    var_mean.correction: x D correction=0 keepdim=b
    topk: x k d
    sort: x d b
    _softmax: x d False
    logsumexp: x D b
    linalg_vector_norm: x k D b
"""
_PRODUCTS = """
    mm: x w
    bmm: x s
    matmul: x w
    addmm: x s s beta=k alpha=k
    linear: x w
    linear: x w ?v
    native_layer_norm: x L ?v ?v f
    scaled_dot_product_attention: x s s
    convolution: x s None [1] [1] [1] False [0] 1
    einsum: ij,jk->ik T
"""
_SHUFFLES = """
    cat: T d
    stack: T d
    flip: t D
    roll: t [1] [0]
    repeat: t S
    index.Tensor: t I
    index_select: t d l
    gather: t d l
    embedding: x l
    scatter.value: t d l n
    constant_pad_nd: t [1,2] n
    one_hot: l 9
    _foreach_mul.Scalar: T n
    _foreach_add.List: T T
    tril_indices: k k
"""
_FACTORIES = """
    zeros: S dtype=y device=V
    ones: S device=V
    full: S n dtype=y device=V
    arange: k dtype=y device=V
    arange.start_step: n n f device=V
    eye: k device=V
    scalar_tensor: n dtype=y device=V
    zeros_like: t dtype=y
    new_zeros: t S
    new_full: t S n
"""
_VIEWS = """
    view: t Z
    alias: t
    detach: t
    t: t
    transpose.int: t d d
    permute: t p
    select.int: t d i
    slice.Tensor: t d i None k
    unsqueeze: t d
    squeeze.dim: t d
    squeeze: t
    expand: t S
    diagonal: t i d d
    as_strided: t [2,2] [2,1] k
    unfold: t d k k
    view_as_real: c
    view_as_complex: x
    _conj: c
    view.dtype: t y
    split.Tensor: t k d
    unbind.int: t d
    split_with_sizes: t [1,2] d
    reshape: t Z
    lift_fresh: t
"""
_IN_PLACE = """
    add_.Tensor: t s alpha=i
    sub_.Tensor: x s
    mul_.Tensor: t s
    mul_.Scalar: t n
    addmm_: x s s
    neg_: t
    relu_: x
    zero_: t
    fill_.Scalar: t n
    fill_.Tensor: t t
    copy_: t t
    clamp_min_: t n
    masked_fill_.Scalar: t m n
    index_put_: t I s
    index_add_: t d l s
    scatter_.value: t d l k
    cumsum_: t d
    lerp_.Scalar: x s f
    addcdiv_: x s s value=k
    t_: t
    transpose_: t d d
    squeeze_.dim: t d
    unsqueeze_: t d
    add.out: t s out=s
    sum.IntList_out: x D True out=s
    _foreach_add_.Scalar: T n
    _foreach_mul_.List: T T
    _foreach_zero_: T
"""
_RANDOM = """
    randn: S device=V
    rand: S dtype=Y device=V
    randint: k S device=V
    randperm: k device=V
    bernoulli.p: x f
    normal_: x
    uniform_: x
    exponential_: x
    random_: t
    native_dropout: x f True
    rand_like: x
    scaled_dot_product_attention: x s s None 0.5
"""
_PLAIN = """
    _local_scalar_dense: t
    equal: t s
    is_nonzero: t
    item: t
    allclose: x s
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
"""Operators that write arguments, change their metadata, or both."""
RANDOM = _read(_RANDOM)
"""Operators that draw random numbers."""
PLAIN = _read(_PLAIN)
"""Operators that return Python values."""
OPERATIONS: Mapping[str, tuple[Operation, ...]] = {
    "pointwise": _read(_POINTWISE),
    "reductions": _read(_REDUCTIONS),
    "products": _read(_PRODUCTS),
    "shuffles": _read(_SHUFFLES),
    "factories": _read(_FACTORIES),
    "views": VIEWS,
    "in place": IN_PLACE,
}
"""Deterministic operators that return tensors, by group."""


def grouped(*groups: str) -> tuple[Operation, ...]:
    """List the operations of some groups, or of all."""
    return tuple(operation for name in groups or OPERATIONS for operation in OPERATIONS[name])


def is_random(operation: Operation) -> bool:
    """Whether an operation draws random numbers."""
    return facts_of(operation.operator).is_random
