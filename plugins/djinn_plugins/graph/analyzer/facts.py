"""Facts about an operator that do not depend on its arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import torch

from djinn.errors import UnknownOperatorError
from djinn.ir.schema import ReturnKind, facts_of
from djinn_plugins.common.operators.operators import operator_named

_ELEMENTWISE = frozenset(
    "_to_copy bernoulli clone copy dropout fill masked_fill native_dropout native_dropout_backward zero".split()
)
"""Elementwise operators that PyTorch does not tag as such."""
_BY_INDEX = frozenset(
    "_embedding_bag _index_put_impl _unsafe_index _unsafe_index_put embedding embedding_bag embedding_dense_backward "
    "gather index index_add index_copy index_fill index_put index_reduce index_select masked_scatter masked_select put "
    "scatter scatter_add scatter_reduce take take_along_dim".split()
)
_OVERWRITING = frozenset(
    "bernoulli cauchy copy exponential fill geometric log_normal normal random set uniform zero".split()
)
"""Operators that do not read the tensor that they write in place."""


@attrs.frozen
class OperatorFacts:
    """Facts about one overload; for an operator that this PyTorch lacks, only its name."""

    name: str
    """Without namespace, overload, and the underscore of in-place operators."""
    operator: torch._ops.OpOverload | None = None
    may_view: bool = False
    """Whether its results share storage with an argument, if it writes nothing."""
    is_elementwise: bool = False
    is_indexed: bool = False
    """Whether it accesses memory by index."""
    is_factory: bool = False
    """Whether it reads no data of its arguments, like ``zeros_like``."""
    is_empty: bool = False
    """Whether it returns uninitialized memory."""
    overwrites: bool = False
    """Whether it writes in place without reading the previous content."""
    needs_client: bool = False
    """Whether its result is not a tensor, or has a shape that depends on data."""
    argument_names: tuple[str, ...] = ()

    @property
    def is_backward(self) -> bool:
        """Whether it computes a derivative."""
        return self.name.endswith(("_backward", "_backward_data", "_backward_input", "_backward_weight"))


def operator_facts(operation: str) -> OperatorFacts:
    """Look an operator up by its qualified name."""
    try:
        return _known(operation)
    except UnknownOperatorError:
        return OperatorFacts(_plain(operation))


def _plain(operation: str) -> str:
    name = operation.partition("::")[2].partition(".")[0] or operation
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@lru_cache(maxsize=4096)
def _known(operation: str) -> OperatorFacts:
    operator = operator_named(operation)
    schema, name = facts_of(operator), _plain(operation)
    tags: Any = operator.tags
    return OperatorFacts(
        name=name,
        operator=operator,
        may_view=operator.is_view,
        is_elementwise=torch.Tag.pointwise in tags or name in _ELEMENTWISE,
        is_indexed=name in _BY_INDEX,
        is_factory=name.endswith("_like") or name.startswith("new_"),
        is_empty=name.startswith(("empty", "new_empty")),
        overwrites=name in _OVERWRITING or any(argument.is_out for argument in operator._schema.arguments),
        needs_client=ReturnKind.PLAIN in schema.returns or torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags,
        argument_names=schema.argument_names,
    )
