"""Graphs of PyTorch's own tracers, in the same terms as what lazy tensors record.

`djinn_graphs_fx.builder.GraphBuilder` makes them: of a model, of a ``torch.fx.GraphModule`` (``symbolic_trace``,
``make_fx``, what Dynamo hands to a backend) and of a ``torch.export.ExportedProgram``.
"""

from __future__ import annotations
