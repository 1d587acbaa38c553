"""Capturing: within the block, factories go to the remote accelerator, and what is recorded can be looked at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from djinn import runtime
from djinn.kinds import PatternMatch
from djinn.model.graph import RecordedGraph
from djinn.graphs import graph_of
from djinn.tape import Node

_local = threading.local()


def _stack() -> list[Captured]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Captured] = _local.stack
    return stack


@attrs.define(eq=False)
class Captured:
    """What a `capture` block has recorded.

    Attributes:
        model: The model that was given, if any.
    """

    model: Any = None
    _nodes: list[Node] = attrs.field(factory=list)

    @property
    def graph(self) -> RecordedGraph:
        """The operations recorded by the block's thread so far, in program order."""
        return graph_of(self._nodes)

    @property
    def patterns(self) -> list[PatternMatch]:
        """What the installed pattern plugins find in `graph`."""
        return find_patterns(self.graph)


class _RemoteFactories(TorchFunctionMode):
    """Gives factories without a device the remote one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None or func not in _device_constructors():
            return func(*args, **kwargs)
        if runtime.device_problem() is None:
            return func(*args, **{**kwargs, "device": runtime.logical_device()})
        made = func(*args, **kwargs)
        return runtime.current().upload(made) if isinstance(made, torch.Tensor) else made


@contextlib.contextmanager
def capture(model: Any = None) -> Iterator[Captured]:
    """Send this thread's factories to the remote accelerator and keep what it records.

    Ordinary tensors that meet lazy ones are uploaded, so a model whose weights are still local works too. Blocks may be
    nested; the inner block's operations belong to the outer one as well.

    Args:
        model: Anything; kept as ``captured.model``.
    """
    captured = Captured(model)
    owner = threading.get_ident()

    def receive(node: Node) -> None:
        if threading.get_ident() == owner:
            captured._nodes.append(node)

    stop: Callable[[], None] = runtime.current().capture(receive)
    _stack().append(captured)
    try:
        with _RemoteFactories():
            yield captured
    finally:
        _stack().remove(captured)
        stop()


def is_capturing() -> bool:
    """Whether this thread is inside a `capture` block."""
    return bool(_stack())


def get_graph() -> RecordedGraph:
    """Return the graph of the innermost `capture` block of this thread; outside any, of what is pending."""
    stack = _stack()
    return stack[-1].graph if stack else graph_of(runtime.current().tape.nodes[:])


def find_patterns(graph: RecordedGraph) -> list[PatternMatch]:
    """Ask every installed pattern plugin what it finds in ``graph``."""
    return [match for pattern in runtime.current().plugins.all("pattern") for match in pattern.find(graph)]


def explain(tensor: torch.Tensor) -> str:
    """Say what is pending behind a lazy tensor and why; executes nothing."""
    from djinn.tape import needed_for
    from djinn.tensor import LazyTensor

    if not isinstance(tensor, LazyTensor):
        return f"An ordinary tensor on {tensor.device}; nothing is pending."
    session = runtime.current()
    session.check_owner(tensor)
    nodes = session.tape.nodes[:]
    slot = tensor._value.slot
    needed = [node for node, is_needed in zip(nodes, needed_for(nodes, [slot]), strict=True) if is_needed]
    head = f"{tensor._value.spec} is value {slot.number} on {session.link.address}"
    if not needed:
        return f"{head}; nothing is pending."
    lines = [f"{head}; reading it runs {len(needed)} of {len(nodes)} pending operations:"]
    for node in needed:
        why = "gives it" if slot in node.outputs else "writes" if node.signature.writes else "feeds it"
        outputs = ", ".join(f"v{s.number}" for s in node.outputs) or "-"
        inputs = ", ".join(f"v{s.number}" for s in node.inputs)
        lines.append(f"  {outputs} = {node.signature.template.operator}({inputs})  {why}  {node.origin}".rstrip())
    return "\n".join(lines)
