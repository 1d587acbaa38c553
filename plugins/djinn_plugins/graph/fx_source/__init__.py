"""Converts graphs of PyTorch's own tracers to the form that lazy tensors record.

`djinn_plugins.graph.fx_source.builder.TracedGraphBuilder` accepts a model, a ``torch.fx.GraphModule`` (from
``symbolic_trace``, ``make_fx``, or passed by Dynamo to a backend) and a ``torch.export.ExportedProgram``.
`djinn.build_graph` uses it through the source ``fx``, for models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.graph.kinds import GraphSource


@hookimpl
def djinn_register_sources(register: Callable[[GraphSource], None]) -> None:
    """Register the plugin's source."""
    from djinn_plugins.graph.fx_source.source import FxSource

    register(FxSource())
