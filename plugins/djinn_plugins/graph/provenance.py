"""Watches a piece of work: which module recorded a node, in which call and stage, and the names of its values."""

from __future__ import annotations

import bisect
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.optim import optimizer as optimizers

from djinn.ir.tape import Node
from djinn.record.tensor import LazyTensor
from djinn_plugins.graph.blocks import BLOCKS
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.graph import Origin, RecordedGraph, ValueInfo
from djinn_plugins.graph.returned import Returned, returned_by, value_in

if TYPE_CHECKING:
    from djinn.session.session import Session

_OUTSIDE, _OPTIMIZER, _MODULES = range(3)
"""Places where a thread can be; values from the last one up are the modules of the model."""
_HERE, _BACKWARD, _ELSEWHERE = "here", "backward", "elsewhere"
"""Who recorded a node: the block's thread, that thread within a backward pass, or another thread within one."""
_in_backward = torch._C._current_graph_task_id
_sequence_number = torch._C._autograd._get_sequence_nr
"""Number of the next node that this thread adds to autograd's graph."""
_NO_NUMBER = 1 << 63
"""Nodes that accumulate gradients have the highest possible number."""


_callers: list[ModuleTracker] = []
"""The watches of the blocks that are calling for gradients now."""
_Stamp: TypeAlias = tuple[int, str]
"""Call and place, as `ModuleTracker` numbers them, and who recorded the node."""


class _Thread:
    """The current place of one thread.

    Attributes:
        stamp: The stamp for its nodes.
        is_in_backward: Whether operations that it records outside autograd also belong to a backward pass.
    """

    __slots__ = ("frames", "is_in_backward", "place", "stamp")

    def __init__(self, mark: int) -> None:
        self.stamp: _Stamp = (mark, _HERE)
        self.place = _OUTSIDE
        self.is_in_backward = False
        self.frames: list[tuple[Any, int]] = []

    def leave(self, entered: Any) -> bool:
        """Return to the place before ``entered``, and leave everything entered since then."""
        for position in range(len(self.frames) - 1, -1, -1):
            if self.frames[position][0] is entered:
                self.place = self.frames[position][1]
                del self.frames[position:]
                return True
        return False


class _Hook:
    """A hook of a module. It becomes a hook that does nothing when the module is copied or saved."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        if self._call is not None:
            self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class ModuleTracker:
    """Keeps the nodes that a block records in its thread, and that autograd records on other threads on its behalf.

    Of the asynchronous tasks of the thread, only the one of the block, and those that it has started in the block,
    belong to it.

    Attributes:
        session: The session that records.

    Args:
        session: The session that records.
        model: A module whose calls are watched, or any other object.
        modules: Whether to watch the model's modules too, not only the model.
        is_rerun: Whether what is recorded may run again with other inputs, so that what the model reads matters.

    Concurrency:
        Any thread may call the function that `receiver` returns, and `graph`. The rest is for the thread that created
        the watch.
    """

    def __init__(self, session: Session, model: Any, modules: bool, is_rerun: bool = False) -> None:
        self.session = session
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._modules: list[tuple[str, Any]] = []
        """Name and module, or the name of its class when watching is over."""
        if self._model is not None:
            named = self._model.named_modules() if modules else [("", self._model)]
            # Scripted modules have no hooks.
            self._modules = [pair for pair in named if not isinstance(pair[1], torch.jit.ScriptModule)]
        self._places = _MODULES + len(self._modules)
        self._call = 0
        self._thread = threading.get_ident()
        self._here = _Thread(0)
        self._threads = {self._thread: self._here}
        # Nodes and stamps alternate: pairs would be objects that garbage collection must traverse.
        self._entries: list[Any] = []
        self._passages: list[tuple[int, int]] = [(0, 0)]
        self._names: dict[int, ValueInfo] = {}
        self._signatures: dict[int, list[str]] = {}
        self._handles: list[Any] = []
        self._has_ordinary = False
        self._is_over = False
        self._is_rerun = is_rerun
        self._readers: set[tuple[str, int]] = set()
        self._results: list[Returned | None] = []
        """What the first calls of the model have returned; two are enough to know that there were several."""

    def __len__(self) -> int:
        return len(self._entries) // 2

    @property
    def is_over(self) -> bool:
        """Whether the block has ended."""
        return self._is_over

    def start(self) -> None:
        """Start watching."""
        for place, (_, module) in enumerate(self._modules, _MODULES):
            self._handles.append(module.register_forward_pre_hook(_Hook(self._entering(place)), prepend=True))
            self._handles.append(module.register_forward_hook(_Hook(self._left), with_kwargs=True, always_call=True))
        self._handles.append(optimizers.register_optimizer_step_pre_hook(self._step_begins))
        self._handles.append(optimizers.register_optimizer_step_post_hook(self._step_ended))
        self._name_model()

    def stop(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._name_model()
        self._is_over = True
        # Who keeps the graph must not keep the model, whose weights are large.
        self._modules = [(name, type(module).__name__) for name, module in self._modules]
        self._model = None
        self._threads.clear()
        self._here.frames.clear()

    def receiver(self) -> Callable[[Node], None]:
        """Return the function that receives each node of any thread; every operation in a block calls it."""
        own, here, extend = self._thread, self._here, self._entries.extend
        current, in_backward, blocks = threading.get_ident, _in_backward, BLOCKS.get

        def receive(node: Node) -> None:
            thread = current()
            if thread != own:
                receive_elsewhere(thread, node)
            elif self in blocks():
                extend((node, here.stamp if in_backward() < 0 else (self._mark_in_backward(here), _BACKWARD)))

        def receive_alone(node: Node) -> None:
            # Without a model, it does not matter whether autograd also uses the block's own thread.
            thread = current()
            if thread != own:
                receive_elsewhere(thread, node)
            elif self in blocks():
                extend((node, here.stamp))

        def receive_elsewhere(thread: int, node: Node) -> None:
            if in_backward() >= 0 and (not _callers or self in _callers):
                extend((node, (self._mark_in_backward(self._threads.get(thread)), _ELSEWHERE)))

        return receive_alone if self._model is None else receive

    def _mark_in_backward(self, thread: _Thread | None) -> int:
        """Return the origin of a node of a backward pass: the place of the forward operation that it belongs to.

        Autograd numbers its nodes as it creates them, so for each place it is enough to know the first number there.
        """
        if thread is not None and thread.place >= _MODULES:
            return thread.stamp[0]  # a checkpoint runs its modules again
        node: Any = torch._C._current_autograd_node()
        number = _NO_NUMBER if node is None else node._sequence_nr()
        if number >= _NO_NUMBER:
            return self._mark(_OUTSIDE)
        return self._passages[bisect.bisect_right(self._passages, number, key=itemgetter(0)) - 1][1]

    @contextlib.contextmanager
    def within_backward(self) -> Iterator[None]:
        """Treat operations that this thread records as part of a backward pass, which begins and ends in the block."""
        before, self._here.is_in_backward = self._here.is_in_backward, True
        self._move(self._here, self._here.place)
        _callers.append(self)
        try:
            yield
        finally:
            _callers.remove(self)
            self._here.is_in_backward = before
            self._move(self._here, self._here.place)

    def graph(self) -> RecordedGraph:
        """View the recorded operations as a graph."""
        if not self._is_over:
            self._name_model()
        entries = self._entries[:]
        entries = _belonging(list(zip(entries[::2], entries[1::2], strict=True)), self._names)
        nodes = [node for node, _ in entries]
        returned = self._results[0] if len(self._results) == 1 else None
        return graph_of(nodes, list(self._origins(entries)), self._values(nodes, returned), returned)

    def reads_at(self, line: tuple[str, int]) -> bool:
        """Note that the program reads a value at a line; returns whether the model reads there, for the first time."""
        is_in_model = self._here.place >= _MODULES and threading.get_ident() == self._thread
        if not self._is_rerun or not is_in_model or line in self._readers:
            return False
        self._readers.add(line)
        return True

    def _mark(self, place: int) -> int:
        return self._call * self._places + place

    def _entering(self, place: int) -> Callable[..., None]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            identity = threading.get_ident()
            if self._is_elsewhere(identity):
                return
            thread = self._threads.get(identity)
            if thread is None:
                thread = self._threads[identity] = _Thread(self._mark(_OUTSIDE))
            # Operations that a checkpoint reruns in a backward pass are not a new call.
            if thread is self._here and thread.place < _MODULES and _in_backward() < 0:
                self._call += 1
            thread.frames.append((module, thread.place))
            self._move(thread, place)

        return enter

    def _is_elsewhere(self, thread: int) -> bool:
        """Whether another task of the block's thread is running."""
        return thread == self._thread and self not in BLOCKS.get()

    def _move(self, thread: _Thread, place: int) -> None:
        thread.place = place
        mark = self._mark(place)
        thread.stamp = (mark, _BACKWARD if thread.is_in_backward else _HERE)
        if thread is self._here and torch.is_grad_enabled():
            self._passages.append((_sequence_number(), mark))

    def _left(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        identity = threading.get_ident()
        thread = None if self._is_elsewhere(identity) else self._threads.get(identity)
        if thread is not None and thread.leave(module):
            self._move(thread, thread.place)
            if thread is self._here and thread.place < _MODULES:
                self._name_inputs(module, args, kwargs)
                if self._has_ordinary:
                    self._name_model()
                if module is self._model and len(self._results) < 2 and _in_backward() < 0:
                    self._results.append(returned_by(
                        result, value_in(self.session), (*self._model.parameters(), *self._model.buffers())))

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or self not in BLOCKS.get():
            return
        self._here.leave(optimizer)
        self._here.frames.append((optimizer, self._here.place))
        self._move(self._here, _OPTIMIZER)
        self._name_gradients(self._parameters_of(optimizer))

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or self not in BLOCKS.get():
            return
        self._here.leave(optimizer)
        self._move(self._here, self._here.place)
        parameters = list(self._parameters_of(optimizer))
        for name, parameter in parameters:
            self._name(parameter, name, "parameter")
            for key, state in optimizer.state.get(parameter, {}).items():
                self._name(state, f"{name}.{key}", "optimizer_state")

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
        known = {} if self._model is None else {id(tensor): name for name, tensor in self._model.named_parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield known.get(id(parameter), f"param_groups.{number}.{position}"), parameter

    def _name(self, tensor: Any, name: str, kind: str) -> None:
        """Record the name of a value, if ``tensor`` belongs to the session or was uploaded to it."""
        if not isinstance(tensor, torch.Tensor):
            return
        lazy = tensor if isinstance(tensor, LazyTensor) else self.session.mixer.uploaded(tensor)
        if lazy is not None and lazy._value.released is self.session.recorder.released:
            value = lazy._value
            known = self._names.get(value.slot.number)
            if known is None or kind != "input":
                self._names[value.slot.number] = ValueInfo(name, kind, value.spec)

    def _name_model(self) -> None:
        """Name parameters and buffers. Ordinary tensors among them get a new value at every upload."""
        if self._model is None:
            return
        parameters, buffers = list(self._model.named_parameters()), list(self._model.named_buffers())
        self._has_ordinary = not all(isinstance(tensor, LazyTensor) for _, tensor in (*parameters, *buffers))
        for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
            for name, tensor in tensors:
                self._name(tensor, name, kind)
        self._name_gradients(parameters)

    def _name_gradients(self, parameters: Iterable[tuple[str, Any]]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in parameters:
                self._name(parameter.grad, f"{name}.grad", "gradient")

    def _name_inputs(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = self._signatures.get(id(module))
        if names is None:
            names = self._signatures[id(module)] = _argument_names(module.forward)
        named = [(names[place] if place < len(names) else str(place), item) for place, item in enumerate(args)]
        for name, item in _leaves([*named, *kwargs.items()]):
            self._name(item, name, "input")

    def _origins(self, entries: Sequence[tuple[Node, _Stamp]]) -> Iterator[Origin]:
        known: dict[_Stamp, Origin] = {}
        for node, stamp in entries:
            origin = known.get(stamp)
            if origin is None:
                mark, kind = stamp
                call, place = divmod(mark, self._places)
                name, module = self._modules[place - _MODULES] if place >= _MODULES else ("", "")
                stage = "backward" if kind != _HERE else "optimizer" if place == _OPTIMIZER else "forward"
                kind_of_module = module if isinstance(module, str) else type(module).__name__
                origin = known[stamp] = Origin(name, kind_of_module, call - 1, stage)
            yield attrs.evolve(origin, line=node.origin) if node.origin else origin

    def _values(self, nodes: Sequence[Node], returned: Returned | None) -> dict[str, ValueInfo]:
        """Return the metadata of values from outside, and of named values from inside."""
        produced: set[int] = set()
        found: dict[str, ValueInfo] = {}
        for node in nodes:
            for slot, spec in zip(node.inputs, node.signature.operands, strict=True):
                if slot.number not in produced and f"v{slot.number}" not in found:
                    found[f"v{slot.number}"] = self._names.get(slot.number) or ValueInfo(spec=spec)
            for slot in node.outputs:
                produced.add(slot.number)
                info = self._names.get(slot.number)
                if info is not None and info.kind != "input":
                    found[f"v{slot.number}"] = info
        for value, known in returned.values.items() if returned else ():
            if int(value[1:]) not in produced:
                found.setdefault(value, self._names.get(int(value[1:])) or ValueInfo(spec=known))
        return found


def _belonging(
    entries: Sequence[tuple[Node, _Stamp]], names: Mapping[int, ValueInfo]
) -> list[tuple[Node, _Stamp]]:
    """Leave out nodes that other threads recorded in a backward pass unrelated to the block.

    A node of another thread belongs to the block if it reads a value that the block made or that has a name, or if,
    like a factory, it provides an input for such a node.
    """
    known = set(names)
    belongs = []
    for node, (_, kind) in entries:
        is_ours = kind != _ELSEWHERE or any(slot.number in known or slot.storage in known for slot in node.inputs)
        belongs.append(is_ours)
        if is_ours:
            known.update(slot.number for slot in node.outputs)
    if all(belongs):
        return list(entries)
    wanted: set[int] = set()
    for position in range(len(entries) - 1, -1, -1):
        node = entries[position][0]
        belongs[position] = belongs[position] or any(slot.number in wanted for slot in node.outputs)
        if belongs[position]:
            wanted.update(slot.number for slot in node.inputs)
    return [entry for entry, is_ours in zip(entries, belongs, strict=True) if is_ours]


def _argument_names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # Not every callable has a signature.
        return []


def _leaves(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """List the leaves of nested arguments, each with its name."""
    for name, item in items:
        if isinstance(item, (list, tuple)):
            yield from _leaves((f"{name}.{position}", member) for position, member in enumerate(item))
        elif isinstance(item, Mapping):
            yield from _leaves((f"{name}.{key}", member) for key, member in item.items())
        else:
            yield name, item
