"""Capturing: inside the block, factories use the remote accelerator, and the recorded operations can be inspected."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from djinn.ir.tape import needed_for
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_lib_graph.analysis import annotate_graph
from djinn_lib_graph.annotated import AnnotatedGraph
from djinn_lib_graph.from_tape import graph_of
from djinn_lib_graph.graph import RecordedGraph
from djinn_lib_graph.kinds import PatternMatch
from djinn_lib_graph.metadata import MetadataPlaceholder, SemanticMetadata, WorkloadProfile
from djinn_lib_graph.provenance import ModuleTracker

_local = threading.local()
_GRADIENTS = frozenset({torch.Tensor.backward, torch.autograd.grad})


def _stack() -> list[Captured]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Captured] = _local.stack
    return stack


@attrs.define(eq=False)
class Captured:
    """The operations that a `capture` block has recorded, and their semantics, computed on demand.

    Attributes:
        model: The model that was given, if any.

    Concurrency:
        Any thread may read.
    """

    model: Any
    _watch: ModuleTracker
    _lock: Any = attrs.field(factory=threading.Lock, init=False)
    _known: tuple[int, RecordedGraph, MetadataPlaceholder] | None = attrs.field(default=None, init=False)

    @property
    def graph(self) -> RecordedGraph:
        """Operations recorded so far, in program order: by the block's thread, or by autograd on its behalf."""
        return self._now()[0]

    @property
    def annotated(self) -> AnnotatedGraph:
        """The annotated graph."""
        found: AnnotatedGraph = self._now()[1].get()
        return found

    @property
    def semantic_metadata(self) -> Mapping[str, SemanticMetadata]:
        """Metadata of each node of `graph`, by its identifier."""
        return self.annotated.nodes

    @property
    def patterns(self) -> tuple[PatternMatch, ...]:
        """Patterns that the installed pattern plugins find in `graph`."""
        return self.annotated.patterns

    @property
    def profile(self) -> WorkloadProfile:
        """A summary of the whole."""
        return self.annotated.profile

    def _now(self) -> tuple[RecordedGraph, MetadataPlaceholder]:
        """Return the graph and its annotations, cached until something more is recorded."""
        with self._lock:
            known, count = self._known, len(self._watch)
            if known is None or known[0] != count:
                graph = self._watch.graph()
                known = self._known = (count, graph, MetadataPlaceholder(lambda: annotate_graph(graph)))
            return known[1], known[2]


class _RemoteFactories(TorchFunctionMode):
    """Gives factories without a device the remote one, and detects the beginning of a backward pass."""

    def __init__(self, watch: ModuleTracker) -> None:
        super().__init__()
        self._watch = watch
        self._others = {*_device_constructors(), *_GRADIENTS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._others:
            return func(*args, **kwargs)
        if func in _GRADIENTS:
            with self._watch.within_backward():
                return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if devices.device_problem() is None:
            return func(*args, **{**kwargs, "device": devices.logical_device()})
        made = func(*args, **kwargs)
        return runtime.current().upload(made) if isinstance(made, torch.Tensor) else made


@contextlib.contextmanager
def capture(model: Any = None, *, modules: bool = True) -> Iterator[Captured]:
    """Send this thread's factories to the remote accelerator and keep the operations that it records.

    Ordinary tensors that are combined with lazy ones are uploaded, so a model with local weights works too. Blocks may
    be nested; the operations of an inner block also belong to the outer one.

    Args:
        model: A module, whose values then have their names in the graph; or any other object, kept as
            ``captured.model``.
        modules: Whether to record which module of the model each operation belongs to. Until the block ends, every
            module of the model has hooks for this, which makes some of PyTorch's modules take their slower path.
    """
    session = runtime.current()
    watch = ModuleTracker(session, model, modules)
    captured = Captured(model, watch)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(watch.stop)
        watch.start()
        cleanup.callback(session.capture(watch.receiver()))
        cleanup.callback(_stack().remove, captured)
        _stack().append(captured)
        if "torch._dynamo" in sys.modules:
            # Compiled functions would run as programs that nobody has recorded.
            cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        with _RemoteFactories(watch):
            yield captured


def is_capturing() -> bool:
    """Whether this thread is inside a `capture` block."""
    return bool(_stack())


def get_graph() -> RecordedGraph:
    """Return the graph of this thread's innermost `capture` block; outside any block, of the pending operations."""
    stack = _stack()
    return stack[-1].graph if stack else graph_of(runtime.current().tape.nodes[:])


def explain_tensor(tensor: torch.Tensor) -> str:
    """Explain which operations are pending behind a lazy tensor, and why. Executes nothing."""
    if not isinstance(tensor, LazyTensor):
        return f"An ordinary tensor on {tensor.device}; nothing is pending."
    session = runtime.current()
    session.check_owner(tensor)
    nodes = session.tape.nodes[:]
    slot = tensor._value.slot
    needed = [node for node, is_needed in zip(nodes, needed_for(nodes, [slot]), strict=True) if is_needed]
    head = f"{tensor._value.spec} is value {slot.number} on {session.backend.address}"
    if not needed:
        return f"{head}; nothing is pending."
    lines = [f"{head}; reading it runs {len(needed)} of {len(nodes)} pending operations:"]
    for node in needed:
        why = "gives it" if slot in node.outputs else "writes" if node.signature.writes else "feeds it"
        outputs = ", ".join(f"v{s.number}" for s in node.outputs) or "-"
        inputs = ", ".join(f"v{s.number}" for s in node.inputs)
        lines.append(f"  {outputs} = {node.signature.template.operator}({inputs})  {why}  {node.origin}".rstrip())
    return "\n".join(lines)
