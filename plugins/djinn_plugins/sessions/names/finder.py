"""The modules of earlier versions, such as ``djinn.core.lazy_tensor`` and ``djinn.frontend.core.capture``.

Each exists as soon as it is imported. Its names are those of the module ``djinn``, or of the library that provides them
today, and are looked up on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ("ALIASES", "find_spec")

_GRAPH = {"Graph": "djinn_plugins.graph.graph", "GraphNode": "djinn_plugins.graph.graph",
          "NodeProtocol": "djinn_plugins.graph.graph:GraphNode",
          "LazyDAGAdapter": "djinn_plugins.graph.graph:RecordedGraph",
          "FXGraphAdapter": "djinn_plugins.graph.fx_source.replaying:FxGraph",
          "FXNodeAdapter": "djinn_plugins.graph.graph:GraphNode",
          "LazyDAGNodeAdapter": "djinn_plugins.graph.graph:GraphNode"}
_FACTORIES = dict.fromkeys(
    ("FactoryInterceptor", "get_factory_interceptor", "unwrap_factories", "wrap_factories"),
    "djinn_plugins.sessions.names.parts")
_CORE: Mapping[str, Mapping[str, str]] = {
    "lazy_tensor": dict.fromkeys(("LazyResult", "LazyTensor", "LazyTuple"), "djinn"),
    "capture": dict.fromkeys(("capture", "get_graph", "is_capturing"), "djinn"),
    "graph_builder": {**dict.fromkeys(("GraphBuilder", "get_global_builder"), "djinn"),
                      "HybridGraphBuilder": "djinn:GraphBuilder",
                      "initialize_global_builder": "djinn_plugins.sessions.names.building"},
    "graph_interface": _GRAPH,
    "types": {**dict.fromkeys(("DataResidency", "ExecutionPhase", "MemoryPattern", "Modality"), "djinn"), **_GRAPH},
    "metadata": {"MetadataPlaceholder": "djinn"},
    "interception": {"get_interception_stats": "djinn", "register_device_backend": "djinn_plugins.sessions.names.parts",
                     "enable_dispatch_interception": "djinn_plugins.sessions.names.parts:register_device_backend",
                     "wrap_factory_functions": "djinn_plugins.sessions.names.parts:wrap_factories",
                     "check_pytorch_compatibility": "djinn_plugins.sessions.names.parts",
                     "FULL_FEATURES": "djinn_plugins.sessions.names.parts"},
    "factory_interceptor": _FACTORIES,
    "universal_dispatcher": {"UniversalDispatcher": "djinn_plugins.sessions.names.parts"},
    "automatic_dispatch": {"AutomaticDispatch": "djinn_plugins.sessions.names.parts"},
    "operation_registry": {"OperationRegistry": "djinn_plugins.sessions.names.parts"},
    "shape_inference": {"ShapeInference": "djinn_plugins.sessions.names.parts:ShapeInferrer"},
    "graph_cache": {"GraphCache": "djinn_plugins.sessions.names.parts"},
    "model_loader_interceptor": {"models": "djinn"},
    "materialization_optimizer": {"MaterializationOptimizer": "djinn_plugins.sessions.names.parts"},
    "interception_control": dict.fromkeys(
        ("InterceptionContext", "disable_interception", "get_current_context", "should_intercept"), "djinn"),
    "executor": {**dict.fromkeys(("execute", "materialize"), "djinn"),
                 **dict.fromkeys(("SimpleExecutor", "get_executor"), "djinn_plugins.sessions.names.executing")},
    "operation_classifier": {"OperationClass": "djinn",
                             "OperationClassifier": "djinn_plugins.sessions.names.classifying"},
    "subgraph_builder": dict.fromkeys(("RemoteSubgraph", "SubgraphBuilder"), "djinn"),
    "smart_subgraph_builder": dict.fromkeys(
        ("CostCalculator", "CostEstimate", "FragmentationConfig", "MemoryEstimator", "SmartSubgraphBuilder",
         "SubgraphFragment"), "djinn"),
}
_SEMANTIC: Mapping[str, Mapping[str, str]] = {
    "": dict.fromkeys(("ExecutionSchedule", "PatternRegistry", "Scheduler", "SchedulingStrategy", "SemanticAnalyzer",
                       "WorkloadProfile", "WorkloadType"), "djinn"),
    "analyzer": {"SemanticAnalyzer": "djinn"},
    "annotator": dict.fromkeys(("AnnotatedGraph", "annotate_graph"), "djinn"),
    "semantic_metadata": {"SemanticMetadata": "djinn", "DataLineage": "djinn_plugins.graph.metadata"},
    "pattern_registry": {"PatternRegistry": "djinn"},
    "pattern_matcher": {**dict.fromkeys(("NetworkXPatternMatcher", "get_default_pattern_matcher"),
                                        "djinn_plugins.sessions.names.parts"),
                        "PatternMatcher": "djinn_plugins.sessions.names.parts:NetworkXPatternMatcher"},
    "workload_classifier": {"WorkloadClassifier": "djinn_plugins.sessions.names.parts"},
    "graph_utils": dict.fromkeys(
        ("analyze_graph_complexity", "find_attention_pattern", "find_mlp_pattern", "graph_to_networkx"),
        "djinn_plugins.sessions.names.patterns"),
}
_PATTERNS: Mapping[str, Mapping[str, str]] = {
    "": dict.fromkeys(("PatternMatch", "PatternPlugin", "PatternRegistry"), "djinn"),
    "base": dict.fromkeys(("PatternMatch", "PatternPlugin"), "djinn"),
    "advanced_patterns": dict.fromkeys(
        ("analyze_graph_complexity", "find_attention_pattern", "find_mlp_pattern", "graph_to_networkx"),
        "djinn_plugins.sessions.names.patterns"),
    "transformer_patterns": {"find_attention_pattern": "djinn_plugins.sessions.names.patterns",
                             "find_patterns": "djinn"},
    "cnn_patterns": {"find_patterns": "djinn"},
}
_STARTING = ("ensure_initialized", "get_coordinator", "get_initialization_time_ms", "get_runtime_state",
             "get_thread_pool", "init", "init_async", "is_initialized", "register_init_hook")


def _within(package: str, modules: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    everything = {name: where for names in modules.values() for name, where in names.items()}
    return {f"{package}.{module}".rstrip("."): names or everything for module, names in {"": {}, **modules}.items()}


ALIASES: Mapping[str, Mapping[str, str]] = {
    **_within("djinn.core", _CORE),
    "djinn.frontend": {},
    **_within("djinn.frontend.core", _CORE),
    **_within("djinn.frontend.semantic", _SEMANTIC),
    **_within("djinn.frontend.patterns", _PATTERNS),
    **_within("djinn.semantic", _SEMANTIC),
    "djinn.runtime": {},
    "djinn.runtime.initialization": {**dict.fromkeys(_STARTING, "djinn"),
                                     "_ensure_async_init": "djinn:ensure_initialized"},
    "djinn.scheduler": {**dict.fromkeys(("schedule", "Scheduler", "SchedulingStrategy"), "djinn"),
                        **dict.fromkeys(("SchedulerBase", "scheduler_registry"),
                                        "djinn_plugins.sessions.names.schedulers")},
}
"""For each module its names, and where each is found: ``module``, or ``module:other_name``."""
_BEHIND = {"djinn.runtime": "djinn.session.runtime"}
"""Modules of today that are known under the name of an earlier one, and answer for all other names."""


class _Loader(Loader):
    """Fills a module with names that are looked up on first use."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Let the module look up its names."""
        names, behind = ALIASES[module.__name__], _BEHIND.get(module.__name__)
        module.__doc__ = f"Names of an earlier version of djinn: {', '.join(sorted(names)) or 'its modules'}."

        def find(name: str) -> Any:
            if name in names:
                where, _, other = names[name].partition(":")
                made = module.__dict__[name] = getattr(import_module(where), other or name)
                return made
            if behind is not None:
                return getattr(import_module(behind), name)
            if f"{module.__name__}.{name}" in ALIASES:
                return import_module(f"{module.__name__}.{name}")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__.update(__all__=tuple(names), __getattr__=find)


def find_spec(name: str) -> ModuleSpec | None:
    """Find a module of an earlier version."""
    if name not in ALIASES:
        return None
    return ModuleSpec(name, _Loader(), is_package=any(other.startswith(f"{name}.") for other in ALIASES))
