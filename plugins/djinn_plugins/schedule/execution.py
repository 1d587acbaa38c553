"""Running a scheduled graph again: its operations are recorded again, in the schedule's order, on new inputs."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch

from djinn.errors import InputsError, ScheduleError
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.tape import Node
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn.wire.tensors import dtype_named
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.graph.graph import GraphNode, Operand, node_of
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.inputs import Inputs, arrived, bind, laid_out_as, outside_values, returned_of
from djinn_plugins.schedule.lazy_tuple import LazyResult, LazyTuple
from djinn_plugins.schedule.placing import Placement, SupportsPlacement, ValueDirectory, placing_of
from djinn_plugins.schedule.results import last_results
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, ExecutionSchedule, LinkProfile

if TYPE_CHECKING:
    from djinn.session.session import Session


Outputs = Sequence[str | torch.Tensor] | None


class ExecutionStrategy(StrEnum):
    """How a scheduled graph is submitted."""

    STREAMING = "streaming"
    """In pieces while it is recorded, so that recording and execution overlap; the session's default."""
    SUBGRAPH = "subgraph"
    """In one piece, as far as no shape in it depends on data. Does not wait."""
    COMPILED = "compiled"
    """As ``subgraph``, but waits until it has run. Later runs refer to the program by its number and use the compiled
    form.
    """
    LOCAL = "local"
    """In this process, by PyTorch itself on the CPU: inputs are fetched, and writes are sent back."""


def execute(
    schedule: ExecutionSchedule, inputs: Inputs = None, *, outputs: Outputs = None,
    strategy: ExecutionStrategy | str | None = None,
) -> Any:
    """Run a scheduled graph on the running session, with new inputs.

    Its operations are recorded again, each on its device. Writes happen again, and random numbers are drawn again.
    Numbers that were fetched while the graph was recorded, for example by ``item()``, keep their values.

    Args:
        schedule: The result of `djinn.schedule`.
        inputs: Values from outside. A sequence gives those that are not weights of the captured model, in the order in
            which the graph first reads them; after them, or instead, the tensors that the captured block made for its
            model, or others in their place. A mapping names them: by their names in the captured model, or by their
            identifiers in the graph. Ordinary tensors are uploaded. Values that are not given are reused, if the
            session still holds them, and the factories of the block run again.
        outputs: The values to return: tensors of the block, or identifiers from ``graph.nodes()[i].outputs``.
        strategy: How to submit the graph; by default, as the schedule's flags say, or as the session does.

    Returns:
        Of a graph that is one call of a captured model, what the model returned, in its structure: a tensor as a
        `djinn.LazyResult`, a tuple as a `djinn.LazyTuple`, and all else as it is. Of any other graph, a
        `djinn.LazyTuple` of the values that the program held when it scheduled the graph, in program order, without
        those from which it had computed others of them; if it held none, the last ones. With ``outputs``, a
        `djinn.LazyTuple` of those. The tensors are lazy, except with the strategy ``local``.

    Raises:
        ScheduleError: The schedule breaks a rule, contains no graph, or requires devices that the session does not
            have.
        InputsError: An input is missing, unknown, or of another size or dtype. Nothing was run.
        Exception: Any exception of an operation.
    """
    chosen = _strategy_named(strategy or (
        ExecutionStrategy.COMPILED if schedule.enable_compilation
        else ExecutionStrategy.STREAMING if schedule.enable_pipelining else None))
    run = ScheduledRun(runtime.current(), schedule, inputs, outputs)
    session = run.session
    if chosen is ExecutionStrategy.LOCAL:
        return run.at_home()
    if chosen is None:
        return run.remotely()
    with flushing(session, "auto" if chosen is ExecutionStrategy.STREAMING else None):
        made = run.remotely()
        if chosen is not ExecutionStrategy.STREAMING:
            session.flush()
        if chosen is ExecutionStrategy.COMPILED:
            session.synchronize()
    return made


@contextlib.contextmanager
def flushing(session: Session, operations: str | None) -> Iterator[None]:
    """Set after how many operations nodes are submitted, for the length of a block."""
    usual, is_fixed = session.flush_every, session.pace._is_fixed
    session.flush_after(operations)
    try:
        yield
    finally:
        session.flush_every = usual
        session.pace.set(usual, is_fixed=is_fixed)


class ScheduledRun:
    """One execution; everything is looked up and checked before anything runs.

    Args:
        session: The session.
        schedule: The schedule.
        inputs: As for `execute`.
        outputs: As for `execute`.
        runs_all: Whether nodes run, too, whose results are not needed.

    Attributes:
        session: The session.
        graph: The graph.
        positions: Index of each device among the session's devices.
        results: Identifiers of the values that it returns.
        is_repeatable: Whether a second run changes nothing: it neither writes outside values nor draws random numbers.
    """

    def __init__(
        self, session: Session, schedule: ExecutionSchedule, inputs: Inputs, outputs: Outputs, *, runs_all: bool = False
    ) -> None:
        if schedule.graph is None:
            raise ScheduleError("The schedule keeps no graph, so there is nothing to run.",
                                hint="Use what djinn.schedule gives.")
        self.session = session
        self.graph = schedule.graph
        self._schedule = schedule
        self.positions = _positions_of(session, schedule)
        check_schedule(schedule, self.graph, schedule.device_infos or devices_in(session))
        outside = outside_values(self.graph)
        nodes = [node_of(self.graph, node) for node in schedule.order]
        read = {value for node in nodes for value in node.inputs}
        self._calls = [_call_of(node, read) for node in nodes]
        self._returned = returned_of(self.graph) if outputs is None else None
        if self._returned is not None and not self._returned.is_complete:
            raise InputsError("The model returned an ordinary tensor: a part of it has run in this process.",
                              hint="Leave its values on the device, or name the results: outputs=[tensor].")
        self.results = (
            [*self._returned.values] if self._returned is not None else last_results(self.graph, schedule)
            if outputs is None else [self._value_of(wanted) for wanted in outputs])
        known = {value for call in self._calls for value in call.node.outputs}.union(value.value for value in outside)
        if unknown := [value for value in self.results if value not in known]:
            raise InputsError(f"The graph gives no value {unknown[0]!r}.",
                              hint="Outputs are tensors that the graph computes, or identifiers in "
                                   "graph.nodes()[i].outputs.")
        self._outside, self._bound = bind(session, self.graph, outside, inputs)
        self._given = {value.maker for value in self._outside}
        self.is_repeatable = not any(value.is_written for value in outside) and not any(
            call.node.is_random for call in self._calls)
        self._last = self._last_uses(runs_all)

    def _value_of(self, wanted: str | torch.Tensor) -> str:
        if not isinstance(wanted, torch.Tensor):
            return wanted
        if not isinstance(wanted, LazyTensor):
            raise InputsError("An ordinary tensor is asked for, and the graph computes lazy ones.")
        self.session.check_owner(wanted)
        return f"v{wanted._value.slot.number}"

    def _results(self, values: Mapping[str, Any]) -> Any:
        if self._returned is None:
            return LazyTuple(values[value] for value in self.results)
        made = self._returned.filled(values)
        return LazyResult((made,)) if self._returned.is_tensor else LazyTuple(made) if type(made) is tuple else made

    def remotely(self, between: Callable[[int], None] | None = None) -> Any:
        """Record the whole graph, each node on its device.

        Args:
            between: Called after each node with its position in the schedule's order.
        """
        placing = placing_of(self.session.backend)
        if placing is None:
            return self._recorded(between, lambda device: None)
        with placed_by_schedule(self.session, placing) as use:
            return self._recorded(between, use)

    def _recorded(self, between: Callable[[int], None] | None, use: Callable[[int], None]) -> Any:
        session = self.session
        position = 0
        placed = itertools.groupby(self._calls, key=lambda call: self.positions[self._schedule.devices[call.node.id]])
        with torch.no_grad(), torch.inference_mode(mode=False):
            values = {}
            for value in self._outside:
                where = (self._schedule.devices[value.maker] if value.maker
                         else self._schedule.placements.get(value.value, ""))
                use(self.positions.get(where, 0))
                values[value.value] = arrived(session, self._bound[value.value], value)
            for device, calls in placed:
                use(device)
                with torch._C._AutoDispatchBelowAutograd():
                    for call in calls:
                        self._step(call, values, position, session.dispatch)
                        if between is not None:
                            between(position)
                        position += 1
        return self._results(values)

    def ends(self, length: int) -> dict[int, int]:
        """Cut the order into pieces of a length, each on one device; return their last positions and first ones."""
        first, ends = 0, {}
        devices = [self._schedule.devices[node] for node in self._schedule.order]
        for position in range(1, len(devices) + 1):
            if position == len(devices) or position - first == length or devices[position] != devices[first]:
                ends[position - 1] = first
                first = position
        return ends

    def at_home(self) -> Any:
        """Run the whole graph in this process, on the CPU.

        Raises:
            ScheduleError: It writes into a storage of which it reads several views from outside.
        """
        self._check_views_at_home()
        outside = [self._bound[value.value] for value in self._outside]
        home = self.session.materialize(outside)
        home = [tensor.cpu().clone() if value.is_written and tensor is given else tensor.cpu()
                for value, tensor, given in zip(self._outside, home, outside, strict=True)]
        with torch.no_grad():
            values = {value.value: laid_out_as(tensor, value.spec)
                      for value, tensor in zip(self._outside, home, strict=True)}
            for position, call in enumerate(self._calls):
                self._step(call, values, position, lambda operator, args, kwargs: operator(*args, **kwargs), "cpu")
            for value, tensor in zip(self._outside, outside, strict=True):
                if value.is_written and not value.maker and isinstance(tensor, LazyTensor):
                    tensor.copy_(values[value.value])
        return self._results(values)

    def _step(
        self, call: _Call, values: dict[str, Any], position: int, dispatch: Callable[..., Any], device: str = ""
    ) -> None:
        node = call.node
        if call.only_asks or node.id in self._given:
            return
        args = tuple(_filled(item, node, values, device) for item in call.arguments)
        kwargs = {name: _filled(item, node, values, device) for name, item in call.keywords.items()}
        made = _new_results(call, dispatch(call.operator, args, kwargs))
        if len(made) != len(node.outputs):
            raise ScheduleError(f"{node.operation} ({node.id}) gave {len(made)} results, and {len(node.outputs)} when "
                                "it was recorded.", hint="How many there are depends on data; record it anew.")
        values.update(zip(node.outputs, made, strict=True))
        for value in self._last.get(position, ()):
            del values[value]

    def _last_uses(self, runs_all: bool) -> dict[int, list[str]]:
        """List by position the values that are not needed after it, so that the executor can free them."""
        last: dict[str, int] = {}
        for position, call in enumerate(self._calls):
            if not call.only_asks:
                last |= dict.fromkeys((*call.node.inputs, *call.node.outputs), position)
        going: dict[int, list[str]] = {}
        keep = {*self.results, *(value.value for value in self._outside)}
        if runs_all:
            made = {value for call in self._calls for value in call.node.outputs}
            keep |= made.difference(*(call.node.inputs for call in self._calls))
        for value, position in last.items():
            if value not in keep:
                going.setdefault(position, []).append(value)
        return going

    def _check_views_at_home(self) -> None:
        seen: set[str] = set()
        for value in self._outside:
            storage = self.graph.storages.get(value.value, value.value)
            if value.is_written and storage in seen:
                raise ScheduleError(f"{value.label} shares memory with another value that the graph reads, and is "
                                    "written: copies at home would not.", hint="Use another execution strategy.")
            seen.add(storage)


@attrs.frozen
class _Argument:
    """A PyTorch constant that a graph represents by its name."""

    kind: str
    name: str


@attrs.frozen
class _Call:
    node: GraphNode
    operator: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    only_asks: bool
    """Whether it only fetches a number, which is not needed in this run."""


def _call_of(node: GraphNode, read: set[str]) -> _Call:
    operator = operator_named(node.operation)
    facts = facts_of(operator)
    kinds = _constants_of(operator)
    names = facts.argument_names
    arguments = tuple(_argument(item, kinds.get(name, "")) for name, item in zip(names, node.arguments, strict=False))
    keywords = {name: _argument(item, kinds.get(name, "")) for name, item in node.keywords.items()}
    only_asks = (not node.writes and not node.is_random and set(facts.returns) == {ReturnKind.PLAIN}
                 and read.isdisjoint(node.outputs))
    return _Call(node, operator, arguments, keywords, only_asks)


@cache
def _constants_of(operator: Any) -> dict[str, str]:
    """Return which arguments are PyTorch constants, for which graphs contain only the names."""
    kinds = {"ScalarType": "dtype", "Layout": "layout", "Device": "device", "MemoryFormat": "memory_format"}
    return {argument.name: kinds[kind] for argument in operator._schema.arguments
            for kind in [str(argument.real_type).removeprefix("Optional[").removesuffix("]")] if kind in kinds}


def _argument(item: Any, kind: str) -> Any:
    return _Argument(kind, item) if kind and isinstance(item, str) else item


def _filled(item: Any, node: GraphNode, values: Mapping[str, Any], device: str) -> Any:
    if isinstance(item, Operand):
        return values[node.inputs[item.position]]
    if isinstance(item, (list, tuple)):
        return [_filled(member, node, values, device) for member in item]
    if not isinstance(item, _Argument):
        return item
    if item.kind == "device":
        return torch.device(device) if device else devices.logical_device()
    return dtype_named(item.name) if item.kind == "dtype" else getattr(torch, item.name)


def _new_results(call: _Call, returned: Any) -> list[Any]:
    """List an operation's new results, flat, without the arguments that it writes and returns."""
    kinds = facts_of(call.operator).returns
    items = returned if len(kinds) > 1 else (returned,) if kinds else ()
    made: list[Any] = []
    for kind, item in zip(kinds, items, strict=True):
        if kind is ReturnKind.LIST:
            made += item
        elif kind is not ReturnKind.WRITTEN:
            made.append(item)
    return made


def devices_in(session: Session) -> list[Any]:
    """List the devices of a session, under the names that schedules use."""
    from djinn_plugins.schedule.scheduling import devices_of

    return devices_of(session)


def _positions_of(session: Session, schedule: ExecutionSchedule) -> dict[str, int]:
    if session.backend.device_count > 1:
        raise ScheduleError("In this session devices are the user's choice, not a schedule's.",
                            hint="Start it with djinn.init(servers=..., placement='automatic').")
    positions = {device.id: position for position, device in enumerate(devices_in(session))}
    if unknown := sorted({*schedule.devices.values()} - positions.keys()):
        raise ScheduleError(f"The schedule places nodes on {', '.join(unknown[:3])}, and the session has "
                            f"{', '.join(positions)}.", hint="Schedule for the running session: devices=None.")
    return positions


class _BySchedule:
    """Places the operations that a run records where its schedule wants them, and all others as before."""

    def __init__(self, usual: Placement) -> None:
        self._usual = usual
        self.shares_generator = usual.shares_generator
        self._thread = threading.get_ident()
        self._executors: dict[int, int] = {}
        self._nodes: list[Node] = []
        self._executor: int | None = None

    def use(self, executor: int | None) -> None:
        """Set the executor for operations that this thread records after this call."""
        self._executor = executor

    def receive(self, node: Node) -> None:
        """Register a node as it is recorded."""
        if self._executor is not None and threading.get_ident() == self._thread:
            self._nodes.append(node)  # keeps the node alive, so that no other node gets its identity
            self._executors[id(node)] = self._executor

    def house(self, size_bytes: int, device: torch.device | None, where: ValueDirectory) -> int:
        """Choose the executor that is to hold an upload."""
        is_ours = self._executor is not None and threading.get_ident() == self._thread
        return self._executor if is_ours and self._executor is not None else (
            self._usual.house(size_bytes, device, where))

    def device_count(self, executors: int) -> int:
        """Pass it on."""
        return self._usual.device_count(executors)

    def devices(self, where: ValueDirectory, values: Sequence[int] = ()) -> list[DeviceInfo]:
        """Pass it on."""
        return self._usual.devices(where, values)

    def pin(self, executor: int | None) -> None:
        """Forward the call; operations placed by a schedule stay where they are."""
        self._usual.pin(executor)

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Forward the call."""
        self._usual.learn(executor, profile, home_link, links)

    def place(self, nodes: Sequence[Node], gone: set[int], where: ValueDirectory) -> list[tuple[Node, int]]:
        """Choose executor and order of a piece of tape: ours stays in order."""
        if any(id(node) in self._executors for node in nodes):
            first = next(iter(self._executors.values()))
            return [(node, self._executors.get(id(node), first)) for node in nodes]
        return self._usual.place(nodes, gone, where)


@contextlib.contextmanager
def placed_by_schedule(session: Session, backend: SupportsPlacement) -> Iterator[Callable[[int], None]]:
    """Let a schedule place the nodes recorded in the block; gives a function that sets the executor of the next ones.

    Everything is handed over before and behind the block, so that the schedule places nothing else.
    """
    with session.lock:
        session.flush()
        usual = backend.placement
        placement = _BySchedule(usual)
        backend.use(placement)
        stop = session.capture(placement.receive)
    try:
        yield placement.use
    finally:
        stop()
        with session.lock:
            placement.use(None)
            session.flush()
            backend.use(usual)


def _strategy_named(strategy: ExecutionStrategy | str | None) -> ExecutionStrategy | None:
    if strategy is None:
        return None
    try:
        return ExecutionStrategy(strategy)
    except ValueError:
        raise ScheduleError(f"There is no execution strategy {strategy!r}; there are "
                            f"{', '.join(ExecutionStrategy)}.") from None
