"""Builds graphs of models: by tracing if possible, otherwise by running."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.export import ExportedProgram
from torch.nn.utils.stateless import _reparametrize_module

from djinn.errors import ConfigurationError, SessionClosedError
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.graph.capture import capture
from djinn_plugins.graph.fx_source.device_remap import InRemoteTerms, OnRemote
from djinn_plugins.graph.fx_source.dry_run import DryRunSession
from djinn_plugins.graph.fx_source.reading import given_to_module, given_to_program
from djinn_plugins.graph.fx_source.replaying import FxGraph, replay
from djinn_plugins.graph.fx_source.tracing import named_state, tensors_within, trace, with_tensors
from djinn_plugins.graph.graph import RecordedGraph


class TracedGraphBuilder:
    """Builds graphs in the form that lazy tensors record, from different sources.

    The caller's modes apply: under ``torch.no_grad()`` composites stay whole, with gradients they are decomposed.

    Concurrency:
        No other thread may use the model meanwhile.
    """

    def build_from_model(self, model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> RecordedGraph:
        """Build the graph of one call of a model.

        The model is traced, which needs no data and computes nothing. If that fails, for example because control flow
        depends on data, the call runs on the remote device, and the graph consists of the recorded operations.

        Args:
            model: The model; its weights may be on any device, even on the meta device if it can be traced.
            *args: Its inputs. Tracing changes neither them nor the model.
            **kwargs: Its inputs by name.

        Returns:
            A graph of the ``backend_type`` ``fx``, or ``lazy_dag`` with the ``fallback_reason``.

        Raises:
            Exception: The model's own error when it runs.
        """
        rehearsal = DryRunSession(runtime.current())
        try:
            traced = trace(rehearsal, model, args, kwargs)
            return replay(rehearsal, traced.module, traced.given, type(model).__name__, OnRemote(rehearsal),
                          traced.returned)
        except SessionClosedError:
            # If the running session is asked for the value, its error is that it does not know the tensor.
            reason = "The model asks for the values of a tensor while it is traced."
        except Exception as error:  # noqa: BLE001  # any error is kept as the reason
            reason = f"{type(error).__name__}: {_first_line(error)}"
        return attrs.evolve(self._run(model, args, kwargs), fallback_reason=reason)

    def build_from_fx(self, source: torch.fx.GraphModule | ExportedProgram, *args: Any, **kwargs: Any) -> FxGraph:
        """Build the graph of a PyTorch tracer's result.

        Args:
            source: A graph of ``symbolic_trace`` or ``make_fx``, one that Dynamo has passed to a backend, or an
                exported program.
            *args: Examples for the placeholders, in order; only their metadata is used. Exported programs and Dynamo's
                graphs need none.
            **kwargs: Examples by name.

        Raises:
            ConfigurationError: The source is of another kind, or there is no example for a placeholder.
            UnsupportedTensorError: The graph depends on data.
        """
        rehearsal = DryRunSession(runtime.current())
        if isinstance(source, ExportedProgram):
            return replay(rehearsal, source.graph_module, list(given_to_program(source)),
                          _class_of(source.graph_module), InRemoteTerms(rehearsal))
        if not isinstance(source, torch.fx.GraphModule):
            raise ConfigurationError(f"A {type(source).__name__} is no graph of torch.fx.",
                                     hint="Give a GraphModule or an ExportedProgram; for models, build_from_model.")
        # Dynamo does not report the class of the model.
        root = source._get_name().removeprefix("GraphModule")
        return replay(rehearsal, source, list(given_to_module(source, args, kwargs)), root, InRemoteTerms(rehearsal))

    @staticmethod
    def _run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedGraph:
        """Run a model on the remote device, on copies of its inputs; the model itself is not moved."""
        state = dict(named_state(model))
        lazy = {id(tensor): _remote(tensor) for tensor in (*state.values(), *tensors_within((args, kwargs)))}
        call_args, call_kwargs = with_tensors((args, kwargs), lazy, model)
        moved = {name: lazy[id(tensor)] for name, tensor in state.items()}
        with _reparametrize_module(model, moved), capture(model) as captured:
            model(*call_args, **call_kwargs)
        graph: RecordedGraph = captured.graph
        return graph


def _remote(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the remote device, with the same role in autograd as the tensor."""
    copied = tensor.detach().clone() if isinstance(tensor, LazyTensor) else runtime.current().upload(tensor)
    return copied.requires_grad_() if tensor.requires_grad else copied


def _class_of(module: torch.fx.GraphModule) -> str:
    """Return the class of an exported model: the outermost module of any node."""
    stacks = (node.meta.get("nn_module_stack") for node in module.graph.nodes)
    first = next((stack for stack in stacks if stack), None)
    return str(next(iter(first.values()))[1]).rpartition(".")[2] if first else ""


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
