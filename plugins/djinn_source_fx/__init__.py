"""Graphs of PyTorch's own tracers, in the same terms as what lazy tensors record.

`djinn_source_fx.builder.GraphBuilder` makes them: of a model, of a ``torch.fx.GraphModule`` (``symbolic_trace``,
``make_fx``, what Dynamo hands to a backend) and of a ``torch.export.ExportedProgram``. The source ``fx``, which
`djinn.build_graph` asks, hands models to it.
"""

from __future__ import annotations

from collections.abc import Callable

from djinn_lib_graph.kinds import GraphSource

from djinn.hookspecs import hookimpl


@hookimpl
def djinn_register_sources(register: Callable[[GraphSource], None]) -> None:
    """Register the plugin's source."""
    from djinn_source_fx.source import FxSource

    register(FxSource())
