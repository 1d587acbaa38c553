"""Plans: asks a scheduler where and when the nodes of a graph should run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import attrs

from djinn.errors import AmbiguousPluginError, ConfigurationError, PluginError
from djinn.ir.value import Slot
from djinn.plugins import Plugins
from djinn.plugins.manager import IN_PROCESS
from djinn.record.devices import logical_device
from djinn.session import runtime
from djinn_plugins.common.device_report import FIRST_REPORT, LOAD_HANDLE, load_in
from djinn_plugins.graph import analysis
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.capture import Captured
from djinn_plugins.graph.graph import Graph, RecordedGraph, node_of
from djinn_plugins.graph.metadata import MetadataPlaceholder, SemanticMetadata, WorkloadProfile
from djinn_plugins.schedule.asking import scheduled
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.costs import CostModel, CostWeights, weighted
from djinn_plugins.schedule.inputs import alive_values, outside_values
from djinn_plugins.schedule.kinds import GraphScheduler
from djinn_plugins.schedule.liveness import MemoryEstimator
from djinn_plugins.schedule.placing import placing_of
from djinn_plugins.schedule.profiles import calibration_of
from djinn_plugins.schedule.results import held_results
from djinn_plugins.schedule.schedule import CostEstimate, DeviceInfo, ExecutionSchedule, StepSpan
from djinn_plugins.schedule.semantics import meaning_of, with_meaning

if TYPE_CHECKING:
    from djinn.session.session import Session

Devices = Sequence[DeviceInfo] | int | None
Metadata = AnnotatedGraph | MetadataPlaceholder | Mapping[str, SemanticMetadata] | None


class SchedulingStrategy(StrEnum):
    """The goal of a schedule; each is the name of a scheduler plugin. Names of other scheduler plugins work too."""

    LATENCY = "latency"
    """Finish one piece of work as soon as possible."""
    THROUGHPUT = "throughput"
    """Finish many pieces per time: devices are equally busy, within their memory."""
    SINGLE = "single"
    """One device, program order."""
    MINIMIZE_LATENCY = "latency"
    """Another name of ``LATENCY``."""
    MAXIMIZE_THROUGHPUT = "throughput"
    """Another name of ``THROUGHPUT``."""


def schedule(
    graph: Graph | AnnotatedGraph | Captured, strategy: SchedulingStrategy | str = SchedulingStrategy.LATENCY,
    devices: Devices = None, weights: CostWeights | None = None,
) -> ExecutionSchedule:
    """Ask a scheduler where and when the nodes of a graph should run. Runs nothing.

    Args:
        graph: The graph. If it is not annotated, it is annotated first: costs and priorities depend on its semantics.
        strategy: ``latency``, ``throughput``, ``single``, or the name of any other installed scheduler.
        devices: Where it may run: descriptions of the devices, or the number of empty devices like the session's first.
            By default, the devices of the running session with their contents; without a session, one device.
        weights: The weights of a second of computing, moving and waiting, for every scheduler. By default, all are 1.

    Returns:
        A schedule that keeps every rule of `djinn_plugins.schedule.check.check_schedule`, with the graph, the devices
        and an estimate of its cost.

    Raises:
        PluginError, AmbiguousPluginError: No scheduler has that name, or several have; the error lists the schedulers.
        ConfigurationError: There is no device, or two devices have the same name.
        ValueError: A weight is negative, or that of computing is zero.
        ScheduleError: The scheduler's result breaks a rule, or the graph fits no device.
    """
    chosen = _scheduler_named(str(strategy))
    meant = _with_results(_with_meaning(graph))
    infos = _device_infos(devices, meant)
    made = scheduled(chosen, meant, infos if weights is None else weighted(infos, weights))
    check_schedule(made, meant, infos)
    if weights is not None:
        made = CostModel(infos, weights).timed(made, meant)
    return _completed(attrs.evolve(made, graph=meant, device_infos=tuple(infos)), meant, infos)


@attrs.frozen(eq=False)
class Scheduler:
    """Schedules one graph; the same as `schedule`, under the name that earlier documents use.

    Args:
        graph: The graph.
        metadata: Metadata of its nodes, if already known.
    """

    graph: Graph | AnnotatedGraph | Captured
    metadata: Metadata = None

    def schedule(
        self, strategy: SchedulingStrategy | str = SchedulingStrategy.LATENCY, devices: Devices = None,
        weights: CostWeights | None = None,
    ) -> ExecutionSchedule:
        """Ask a scheduler, as `djinn.schedule` does."""
        graph, metadata = self.graph, self.metadata
        known = metadata.get() if isinstance(metadata, MetadataPlaceholder) else metadata
        if isinstance(known, AnnotatedGraph):
            graph = known
        elif known is not None:
            plain = graph.graph if isinstance(graph, (AnnotatedGraph, Captured)) else graph
            graph = AnnotatedGraph(plain, known, {}, (), WorkloadProfile(nodes=len(known)))
        return schedule(graph, strategy, devices, weights)


def devices_of(session: Session, graph: Graph | None = None) -> list[DeviceInfo]:
    """Describe a session's devices.

    Args:
        session: The session.
        graph: Determines for which values their location matters.
    """
    held = {} if graph is None else alive_values(session, outside_values(graph))
    backend = session.backend
    placing = placing_of(backend)
    if placing is None:
        sizes = {tensor._value.slot.storage: tensor._value.spec.reach_bytes for tensor in held.values()}
        known, welcome = calibration_of(session), backend.welcome
        with session.lock:
            told = backend.fetch([Slot(LOAD_HANDLE, FIRST_REPORT)], whole=False)[0]
        return [DeviceInfo(str(session.device), memory_bytes=welcome.memory_bytes or None,
                           held_bytes=max(sum(sizes.values()), welcome.held_bytes), holds=frozenset(held),
                           profile=known.profile, home_link=known.home_link,
                           load=load_in(told, backend.address))]
    if session.backend.device_count > 1:
        return [DeviceInfo(f"{session.device.type}:{index}") for index in range(session.backend.device_count)]
    with session.lock:
        session.flush()
        return placing.devices([int(value[1:]) for value in held])


def _device_infos(devices: Devices, graph: Graph) -> list[DeviceInfo]:
    if devices is None:
        if runtime.is_initialized():
            return devices_of(runtime.current(), graph)
        return [DeviceInfo(str(logical_device()))]
    if isinstance(devices, int):
        first = devices_of(runtime.current())[0] if runtime.is_initialized() else DeviceInfo("")
        kind = logical_device().type
        # Assume that they are empty: the question is a hypothetical placement, not the movement of existing values.
        infos = [attrs.evolve(first, id=f"{kind}:{position}", held_bytes=0, holds=frozenset(), copies=frozenset(),
                              links={}) for position in range(devices)]
    else:
        infos = list(devices)
    names = [info.id for info in infos]
    if not infos or len(set(names)) < len(names):
        raise ConfigurationError(f"A schedule is asked for {len(infos)} devices: {', '.join(names) or 'none'}.",
                                 hint="Give at least one device, and each a name of its own.")
    return infos


def _scheduler_named(name: str) -> GraphScheduler:
    plugins = analysis._plugins()
    known = plugins.registered("scheduler")
    if name not in known and IN_PROCESS:
        # It may have been registered since the session began.
        known = Plugins.load(plugins.selection).registered("scheduler")
    answers = known.get(name, [])
    if not answers:
        raise PluginError(f"No scheduler is called {name!r}; there are {', '.join(sorted(known)) or 'none'}.",
                          hint="Choose one of them, or install a plugin that brings it.")
    if len(answers) > 1:
        raise AmbiguousPluginError(f"Several schedulers are called {name!r}: "
                                   f"{' and '.join(entry.plugin for entry in answers)}.",
                                   hint="Switch one off with DJINN_PLUGINS=-NAME, or uninstall it.")
    found: GraphScheduler = answers[0].value
    return found


def _with_meaning(graph: Graph | AnnotatedGraph | Captured) -> Graph:
    if isinstance(graph, Captured):
        return with_meaning(graph.annotated)
    if isinstance(graph, AnnotatedGraph):
        return with_meaning(graph)
    if any(meaning_of(node) is None for node in graph.nodes()):
        return with_meaning(analysis.annotate_graph(graph))
    return graph


def _with_results(graph: Graph) -> Graph:
    """Let a graph that is not one call of a model return what the program holds now."""
    if not isinstance(graph, RecordedGraph) or graph.returned is not None or not runtime.is_initialized():
        return graph
    return attrs.evolve(graph, returned=held_results(runtime.current(), graph))


def _completed(made: ExecutionSchedule, graph: Graph, infos: Sequence[DeviceInfo]) -> ExecutionSchedule:
    """Fill in what the scheduler left open: cost, memory, and the times of nodes on each device."""
    more: dict[str, Any] = {}
    if not made.spans and len({*made.devices.values()}) == 1 and not made.transfers:
        costs, begin_s, spans = CostModel(infos), 0.0, {}
        for node in (node_of(graph, identifier) for identifier in made.order):
            spans[node.id] = StepSpan(begin_s, begin_s + costs.node_seconds(node, made.devices[node.id]))
            begin_s = spans[node.id].end_s
        more["spans"] = spans
    if of_nodes := {node: policy for node, policy in made.caching.items() if graph.get_node(node) is not None}:
        more["caching"] = {**{value: policy for value, policy in made.caching.items() if value not in of_nodes},
                           **{value: policy for node, policy in of_nodes.items()
                              for value in node_of(graph, node).outputs}}
    if made.estimate == CostEstimate():
        more["estimate"] = CostModel(infos).estimate(made, graph)
    if not made.budgets:
        more["budgets"] = MemoryEstimator(graph).estimate(made, infos).peaks
    return attrs.evolve(made, **more)
