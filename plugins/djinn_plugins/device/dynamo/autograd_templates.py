"""The autograd nodes of a recorded graph, kept to be run again for other values.

A template holds no values: in place of each tensor that autograd has saved, it has a number. A call has the values for
these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from djinn.ir.value import Slot, Value
from djinn.record.tensor import LazyTensor, wrap

if TYPE_CHECKING:
    from djinn_plugins.device.dynamo.remote_gradients import BackwardPlan

MODIFIED = """one of the variables needed for gradient computation has been modified by an inplace operation: a tensor \
of shape {shape}, saved by a graph of torch.compile."""


def is_plain_autograd() -> bool:
    """Whether autograd does the same here as in the recording: no mode or hook watches, packs or transforms it."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]  # missing in the stubs
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.is_anomaly_enabled()
    )


class AutogradTemplate:
    """The autograd nodes of a recorded graph, without values.

    Attributes:
        packed: The tensors that autograd saved; forgotten once their places are known.
    """

    def __init__(self) -> None:
        self.packed: list[LazyTensor] = []
        self._versions: list[int] = []
        self._modified: set[int] = set()
        self._values: Sequence[Value] = ()
        self._roots: list[GradientEdge] = []
        self._leaves: list[GradientEdge] = []
        self._uses: list[int] = []
        self._users: dict[Any, list[tuple[int, int]]] = {}
        self._arrived: list[tuple[int, LazyTensor]] = []
        self.backwards: dict[tuple[Any, ...], BackwardPlan | None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Receive the tensors that autograd saves."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        with torch._C.DisableTorchFunctionSubclass():
            self._modified = {index for index, tensor in enumerate(self.packed)
                              if tensor._version != self._versions[index]}

    def _pack(self, tensor: Any) -> int:
        self.packed.append(tensor)
        self._versions.append(tensor._version)
        return len(self.packed) - 1

    def _unpack(self, position: int) -> LazyTensor:
        value = self._values[position]
        if position in self._modified:
            raise RuntimeError(MODIFIED.format(shape=list(value.spec.size)))
        return wrap(value.spec, value)

    def prepare(self, roots: Sequence[LazyTensor], leaves: Sequence[LazyTensor]) -> bool:
        """Find the nodes between results and operands; tell whether they hold no tensors but saved ones."""
        self._roots = [get_gradient_edge(root) for root in roots]
        self._leaves = [get_gradient_edge(leaf) for leaf in leaves]
        places = {edge.node: index for index, edge in enumerate(self._leaves)}
        self._uses = [0] * len(leaves)
        waiting = [edge.node for edge in self._roots]
        while waiting:
            node = waiting.pop()
            if node in self._users or node in places:
                continue
            if not _holds_no_tensors(node):
                return False
            following = [after for after, _ in node.next_functions]
            self._users[node] = [(index, places[after]) for index, after in enumerate(following) if after in places]
            for _, place in self._users[node]:
                self._uses[place] += 1
            waiting += filter(None, following)
        return True

    def keep(self, leaves: Sequence[LazyTensor]) -> None:
        """Prepare the nodes for the calls to come, and release the values of this one."""
        for node, found in self._users.items():
            if several := [pair for pair in found if self._uses[pair[1]] > 1]:
                node.register_hook(self._collector(several))
        self._users, self.packed = {}, []
        for leaf in leaves:
            # Autograd keeps the leaf, which need not keep the value.
            leaf._value = Value(Slot(0, 0), leaf._value.spec, _keep)

    def _collector(self, pairs: Sequence[tuple[int, int]]) -> Callable[[Any, Any], None]:
        def collect(gradients: Any, _: Any) -> None:
            self._arrived += [(leaf, gradients[position]) for position, leaf in pairs
                              if gradients[position] is not None]

        return collect

    @property
    def inputs(self) -> list[int]:
        """Which leaves receive gradients: one of several uses several, because autograd adds them up in order."""
        return [leaf for leaf, uses in enumerate(self._uses) for _ in range(uses)]

    def differentiate(self, values: Sequence[Value], incoming: Sequence[Any]) -> list[Any]:
        """Record the backward pass of a call; one gradient for each of `inputs`."""
        pairs = [(root, gradient) for root, gradient in zip(self._roots, incoming, strict=True) if gradient is not None]
        self._values = values
        try:
            roots, given = zip(*pairs, strict=True)
            sums = torch.autograd.grad(roots, self._leaves, given, retain_graph=True, allow_unused=True)
            arrived = self._arrived
        finally:
            self._values, self._arrived = (), []
        found: list[Any] = []
        for leaf, uses in enumerate(self._uses):
            mine = [gradient for index, gradient in arrived if index == leaf] if uses > 1 else [sums[leaf]][:uses]
            found += mine + [None] * (uses - len(mine))
        return found


def _keep(_: int) -> None:
    """Do not release: the value belongs to another object."""


def _holds_no_tensors(node: Any) -> bool:
    """Whether a node holds only tensors that it has saved as PyTorch's own nodes do."""
    function = getattr(type(node), "_forward_cls", None)
    return function is None or function.__module__.startswith("djinn_")
