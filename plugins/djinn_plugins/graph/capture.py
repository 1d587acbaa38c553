"""Capturing: inside the block, factories use the remote accelerator, and the recorded operations can be inspected."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import _device_constructors

from djinn.errors import NothingCapturedError
from djinn.ir.tape import needed_for
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.graph.analysis import annotate_graph
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.blocks import BLOCKS
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.graph import GraphNode, RecordedGraph
from djinn_plugins.graph.interception import is_disabled
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.links import links_of
from djinn_plugins.graph.metadata import MetadataPlaceholder, SemanticMetadata, WorkloadProfile
from djinn_plugins.graph.provenance import ModuleTracker

_local = threading.local()
_last: ContextVar[Any] = ContextVar("djinn_last_capture", default=None)
"""What stands for the last block of a task that has ended; a thread has one as well, for code around its tasks."""
_GRADIENTS = frozenset({torch.Tensor.backward, torch.autograd.grad})
_LIKE = frozenset(getattr(torch, f"{name}_like") for name in "empty full ones rand randint randn zeros".split())
"""Factories that take size and dtype, and usually the device, from a tensor."""
_FROM_MEMORY = ("from_numpy", "frombuffer")
"""Factories that PyTorch shows to no mode; see `_show_to_modes`."""


def _stack() -> list[ModuleTracker]:
    """List the watches of the blocks in which this task is; one that was started in a block may outlive it."""
    return [watch for watch in BLOCKS.get() if not watch.is_over]


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
                annotations = MetadataPlaceholder(lambda: annotate_graph(graph))
                for node in graph.nodes()[:1]:
                    links_of(node).annotate = annotations.get
                known = self._known = (count, graph, annotations)
            return known[1], known[2]


class _RemoteFactories(TorchFunctionMode):
    """Gives factories without a device the remote one, and detects the beginning of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._others = {*_device_constructors(), *_GRADIENTS, *_LIKE, torch.normal}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Other tasks of this thread have the mode, too.
        if func not in self._others or is_disabled() or not (blocks := _stack()):
            return func(*args, **kwargs)
        if func in _GRADIENTS:
            with contextlib.ExitStack() as within:
                for watch in blocks:
                    within.enter_context(watch.within_backward())
                return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            return func(*args, **kwargs)
        tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        if func in _LIKE and isinstance(next(iter(tensors), None), LazyTensor):
            return func(*args, **kwargs)
        if func is torch.normal and tensors:
            # It takes no device: its result is where its tensors are.
            upload = runtime.current().mixer.upload
            return func(*(upload(item) if isinstance(item, torch.Tensor) else item for item in args),
                        **{name: upload(item) if isinstance(item, torch.Tensor) and name != "out" else item
                           for name, item in kwargs.items()})
        if devices.device_problem() is None:
            return func(*args, **{**kwargs, "device": devices.logical_device()})
        made = func(*args, **kwargs)
        return runtime.current().upload(made) if isinstance(made, torch.Tensor) else made


    def __exit__(self, *exception: object) -> None:
        # Tasks of one thread take turns: modes of others may be above this one.
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)


@contextlib.contextmanager
def capture(model: Any = None, *, modules: bool = True) -> Iterator[Captured]:
    """Send this thread's factories to the remote accelerator and keep the operations that it records.

    In a thread with asynchronous tasks, this is so for the task of the block and for those that it starts within it.
    Ordinary tensors that are combined with lazy ones are uploaded, so a model with local weights works too. Blocks may
    be nested; the operations of an inner block also belong to the outer one.

    Args:
        model: A module, whose values then have their names in the graph; or any other object, kept as
            ``captured.model``.
        modules: Whether to record which module of the model each operation belongs to. Until the block ends, every
            module of the model has hooks for this, which makes some of PyTorch's modules take their slower path.
    """
    session = runtime.current()
    watch = ModuleTracker(session, model, modules, is_rerun=True)
    captured = Captured(model, watch)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_keep, watch)
        cleanup.callback(watch.stop)
        watch.start()
        _show_to_modes()
        cleanup.callback(session.capture(watch.receiver()))
        cleanup.callback(_leave, watch)
        BLOCKS.set((*BLOCKS.get(), watch))
        if "torch._dynamo" in sys.modules:
            # Compiled functions would run as programs that nobody has recorded.
            cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        with _RemoteFactories():
            yield captured


def _leave(watch: ModuleTracker) -> None:
    BLOCKS.set(tuple(other for other in BLOCKS.get() if other is not watch))


def is_capturing() -> bool:
    """Whether this thread, or this asynchronous task, is inside a `capture` block."""
    return bool(_stack())


def get_graph() -> RecordedGraph:
    """Return the graph of the innermost `capture` block of this thread or task, or of the block that ended last.

    Without any block in this session, it is the graph of the pending operations.

    Raises:
        NothingCapturedError: There are none.
    """
    stack = _stack()
    if stack:
        return stack[-1].graph()
    session, last = devices.running_session(), last_capture()
    if last is not None and last.session is session and len(last):
        graph: RecordedGraph = last.graph()
        return graph
    if session is None or not session.tape.nodes:
        raise NothingCapturedError("No operation has been captured, and none is pending.",
                                   hint="Put the operations into a block: with djinn.capture(): ...")
    return graph_of(session.tape.nodes[:])


def last_capture() -> Any:
    """Return what stands for the last block of this task or thread that has ended; ``None`` if there was none."""
    return _last.get() or getattr(_local, "last", None)


def recorded_node(tensor: LazyTensor) -> GraphNode | None:
    """Find the operation that gave a tensor, among those that are pending and those of this thread's last captures."""
    value = f"v{tensor._value.slot.number}"
    session = devices.running_session()
    graphs = [watch.graph() for watch in reversed(_stack())]
    last = last_capture()
    if last is not None and last.session is session:
        graphs.append(last.graph())
    if session is not None:
        graphs.append(graph_of(session.tape.nodes[:]))
    for graph in graphs:
        for node in graph:
            if value in node.outputs:
                return node
    return None


def _keep(watch: ModuleTracker) -> None:
    """Remember a block that has ended for `get_graph`; it holds neither the model nor any tensor."""
    _local.last = watch
    _last.set(watch)


def _show_to_modes() -> None:
    """Let blocks send what these factories make to the remote device. Done once, at the first block of a process."""
    for name in _FROM_MEMORY:
        function = getattr(torch, name)
        if hasattr(function, "__wrapped__"):
            continue

        def made(*args: Any, _function: Callable[..., Any] = function, **kwargs: Any) -> Any:
            local = _function(*args, **kwargs)
            return runtime.current().upload(local) if _stack() and not is_disabled() else local

        setattr(torch, name, functools.wraps(function)(made))


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
