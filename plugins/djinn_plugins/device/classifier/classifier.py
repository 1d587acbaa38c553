"""The classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from djinn.ir.phase import ExecutionPhase
from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds import OperationClass
from djinn_plugins.common.operators.operators import is_as_declared

_WHOLE = frozenset({
    "aten::linear", "aten::matmul", "aten::layer_norm", "aten::group_norm",
    "aten::rms_norm", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::bilinear",
    "aten::softmax.int", "aten::log_softmax.int", "aten::cross_entropy_loss", "aten::nll_loss_nd",
    "aten::embedding_bag", "aten::instance_norm", "aten::silu", "aten::gelu", "aten::linalg_svdvals",
    "aten::linalg_eigvalsh", "aten::lstm.input", "aten::gru.input", "aten::rnn_tanh.input", "aten::rnn_relu.input",
    "aten::max_pool1d",
})
"""Composites that patterns and fast kernels need whole. None of them returns an argument or a view of one."""

_SOFTMAX = frozenset({"aten::_softmax", "aten::softmax.int", "aten::_safe_softmax"})
_ATTENTION_RANK = 4
"""Batch, heads, rows, and columns or features."""
_FEW = 8
"""Maximum positions of one step of a generating language model: speculative drafts are checked together."""

_REDUCTIONS = frozenset(
    "sum mean prod amax amin max min argmax argmin all any norm linalg_vector_norm std var logsumexp median mode "
    "count_nonzero nansum".split()
)
_INDEXING = frozenset({"aten::index.Tensor"})
"""Tagged as data-dependent because a mask may be among the indices; without one the shape is known."""


def _tells_no_sizes(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator of an extension has no kernel from which the sizes of its results follow."""
    is_of_extension = not is_as_declared(operator) and not operator.namespace.startswith(("djinn", "prim"))
    return is_of_extension and not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        for key in ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd"))


class CoreClassifier:
    """Classifies by schema and tags; the few names affect placement, not correctness."""

    name = "core"

    def classify(self, operator: torch._ops.OpOverload) -> OperationClass:
        """Return how the operator is executed."""
        facts = facts_of(operator)
        if ReturnKind.PLAIN in facts.returns:
            return OperationClass.TRIGGER
        depends_on_data = torch.Tag.dynamic_output_shape in operator.tags and facts.name not in _INDEXING
        if depends_on_data or _tells_no_sizes(operator):
            return OperationClass.DATA_DEPENDENT
        if len(facts.returns) > 1 or ReturnKind.LIST in facts.returns:
            return OperationClass.TUPLE
        base = facts.name.partition("::")[2].partition(".")[0]
        return OperationClass.REDUCTION if base in _REDUCTIONS else OperationClass.COMPUTE

    def is_random(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it may draw random numbers."""
        return facts_of(operator).is_random

    def keep_whole(self, operator: torch._ops.OpOverload) -> bool:
        """Whether the composite is recorded as it is."""
        return facts_of(operator).name in _WHOLE

    def reveals_phase(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it is attention, or the part of one that has a row for each position."""
        name = facts_of(operator).name
        return name in _SOFTMAX or "scaled_dot_product" in name

    def phase_of(self, operator: torch._ops.OpOverload, sizes: Sequence[Sequence[int]]) -> ExecutionPhase:
        """Determine whether a language model is decoding: a few positions attend to more than themselves."""
        if not sizes or len(sizes[0]) != _ATTENTION_RANK:
            return ExecutionPhase.UNKNOWN
        if facts_of(operator).name in _SOFTMAX:
            rows, columns = sizes[0][-2:]
        elif len(sizes) > 1 and len(sizes[1]) == _ATTENTION_RANK:
            rows, columns = sizes[0][-2], sizes[1][-2]
        else:
            return ExecutionPhase.UNKNOWN
        return ExecutionPhase.LLM_DECODE if 0 < rows <= _FEW and rows < columns else ExecutionPhase.UNKNOWN

    def hides_effects(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it may have effects that its schema does not declare.

        Schemas of batch norms do not declare that they write their statistics. Foreign operators may do anything.
        """
        facts = facts_of(operator)
        return not is_as_declared(operator) or any(
            name.startswith("running_") and name not in facts.written for name in facts.argument_names)

    def shares_silently(self, operator: torch._ops.OpOverload) -> bool:
        """Whether results may share memory with its first tensor although its schema does not declare it."""
        return facts_of(operator).name.partition("::")[2].lstrip("_").startswith("unsafe_")
