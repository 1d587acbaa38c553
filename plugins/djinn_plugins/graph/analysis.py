"""Semantic graphs: sources build them from models, patterns and analyzers annotate them, exporters write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import attrs
import torch

from djinn.errors import AmbiguousPluginError, ConfigurationError, PluginError, PluginValidationError
from djinn.plugins import DEFAULTS, Plugins, PluginSelection
from djinn.plugins.manager import IN_PROCESS
from djinn.session import runtime
from djinn_plugins.graph import annotated as model
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.kinds import Exporter, GraphSource, PatternMatch
from djinn_plugins.graph.kinds.analyzer import Annotations
from djinn_plugins.graph.metadata import DataResidency, SemanticMetadata, Tier, WorkloadProfile

_FIELDS = frozenset(field.name for field in attrs.fields(SemanticMetadata))
_loaded: Plugins | None = None


def _plugins() -> Plugins:
    """Return the running session's plugins; without a session, those of the environment. Starts no session."""
    global _loaded
    if runtime.is_initialized():
        return cast("Plugins", runtime.current().plugins)
    if _loaded is None or IN_PROCESS:
        _loaded = Plugins.load(PluginSelection.parse(os.environ.get("DJINN_PLUGINS", "")))
    return _loaded


def build_graph(model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Graph:
    """Build the graph of ``model(*args, **kwargs)`` with the chosen source, as `djinn.capture` would record it.

    The built-in source traces the model, which needs no data and runs nothing. Where tracing is impossible, for example
    because control flow depends on data, it runs the call on the remote device, on copies.

    Args:
        model: The model; its weights may be on any device. Neither it nor its inputs are changed.
        *args: Its inputs.
        **kwargs: Its inputs by name.

    Returns:
        The graph. Its ``backend_type`` names its origin, and its ``fallback_reason`` says why it does not come from a
        tracer.

    Raises:
        ConfigurationError: ``model`` is not a module.
        PluginError, AmbiguousPluginError: There is no source, or the choice is ambiguous.
        Exception: Any exception of the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"A {type(model).__name__} is no module, and no graph is made of it.",
                                 hint="djinn.capture() records whatever is done within its block.")
    source: GraphSource = _plugins().choose("source", DEFAULTS["source"])
    return source.build(model, args, kwargs)


def find_patterns(graph: Graph) -> list[PatternMatch]:
    """Run every installed pattern plugin on ``graph``."""
    found = [match for pattern in _plugins().all("pattern") for match in pattern.find(graph)]
    operations = {node.id: node.operation for node in graph.nodes()} if found else {}
    return [match if match.operation_sequence else attrs.evolve(
        match, operation_sequence=[operations[node] for node in match.nodes if node in operations]) for match in found]


def annotate_graph(graph: Graph, matches: Sequence[PatternMatch] | None = None) -> AnnotatedGraph:
    """Annotate a graph with every installed pattern and analyzer plugin.

    If two analyzers set the same field, the later one, by the order of their names, takes precedence.

    Args:
        graph: A recorded graph, or one from another source.
        matches: The patterns in it, if they are known; by default, installed plugins find them.

    Raises:
        PluginValidationError: An analyzer refers to something that is not in the graph, or to unknown fields.
    """
    began = perf_counter()
    matches = find_patterns(graph) if matches is None else matches
    seconds = {Tier.STRUCTURE: perf_counter() - began}
    fields = {node.id: _known_of(node) for node in graph.nodes()}
    values: dict[str, DataResidency] = {}
    profile = None
    for registered in _plugins().find_all("analyzer"):
        found = registered.value.annotate(graph, matches)
        try:
            _merge(fields, found)
        except (KeyError, TypeError) as error:
            raise PluginValidationError(
                f"The analyzer {registered.name!r} of {registered.plugin} annotates what does not exist: {error}.",
                hint=f"Correct it, or switch it off with DJINN_PLUGINS=-{registered.plugin}.") from error
        values.update(found.values)
        profile = found.profile or profile
        for tier, took in found.seconds.items():
            seconds[tier] = seconds.get(tier, 0.0) + took
    return AnnotatedGraph(graph, {node: SemanticMetadata(**known) for node, known in fields.items()}, values,
                          tuple(matches), profile or _counted(fields, matches), seconds)


def _known_of(node: GraphNode) -> dict[str, Any]:
    """Return the annotations that the node itself determines."""
    spec, origin = node.specs[0] if node.specs else None, node.origin
    return {
        "operation_type": node.operation,
        "tensor_shape": None if spec is None else tuple(spec.size),
        "dtype": None if spec is None else str(spec.dtype).removeprefix("torch."),
        "module_path": origin.module_path if origin.module_type else None,
        "model_module": origin.module_type or None,
        "call_index": origin.call_index if origin.call_index >= 0 else None,
    }


def _merge(fields: Mapping[str, dict[str, Any]], found: Annotations) -> None:
    for node, said in found.nodes.items():
        if unknown := said.keys() - _FIELDS:
            raise TypeError(f"field {min(unknown)} of {node}")
        known = fields[node]
        merged = {name: {**known[name], **said[name]} for name in ("evidence", "workload_hints")
                  if name in said and name in known}
        known.update(said, **merged)


def _counted(fields: Mapping[str, Any], matches: Sequence[PatternMatch]) -> WorkloadProfile:
    """Fill in the summary fields that need no analyzer."""
    counts: dict[str, int] = {}
    for match in matches:
        counts[match.pattern] = counts.get(match.pattern, 0) + 1
    return WorkloadProfile(nodes=len(fields), patterns=counts)


def export(annotated: AnnotatedGraph, path: str | os.PathLike[str], exporter: str = "") -> Path:
    """Write an annotated graph to a file.

    Args:
        annotated: The annotated graph.
        path: The file; its suffix selects the format.
        exporter: Name of the exporter to use, regardless of the suffix.

    Returns:
        The path.

    Raises:
        PluginError: No exporter writes such files; the error lists the supported suffixes.
        AmbiguousPluginError: Several exporters do, none of them is chosen, and none is named like the suffix.
    """
    target = Path(path)
    _exporter(target, exporter).export(annotated, target)
    return target


def _exporter(path: Path, name: str) -> Exporter:
    plugins = _plugins()
    registered = [entry for entries in plugins.registered("exporter").values() for entry in entries]
    answers = [entry for entry in registered
               if (entry.name == name if name else path.name.endswith(entry.value.suffix))]
    suffix = max((entry.value.suffix for entry in answers), key=len, default="")
    if not name:
        # The chosen one, or the one that is named like the suffix, as djinn's own are.
        answers = [entry for entry in answers if entry.value.suffix == suffix]
        for preferred in (plugins.selection.chosen.get("exporter"), suffix.removeprefix(".")):
            answers = [entry for entry in answers if entry.name == preferred] or answers
    if not answers:
        known = ", ".join(f"{entry.name!r} ({entry.value.suffix})" for entry in registered)
        raise PluginError(f"No exporter {f'is called {name!r}' if name else f'writes {path.name}'}; "
                          f"there are {known or 'none'}.",
                          hint="Choose another suffix, or install a plugin that writes it.")
    if len(answers) > 1:
        raise AmbiguousPluginError(f"Several exporters write {path.name}: "
                                   f"{' and '.join(f'{e.name!r} of {e.plugin}' for e in answers)}.",
                                   hint=f"Choose one: export(path, exporter={answers[0].name!r}), or "
                                        f"DJINN_PLUGINS=exporter={answers[0].name}.")
    chosen: Exporter = answers[0].value
    return chosen


model.use_export(export)
