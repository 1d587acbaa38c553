"""Graphs of models: by tracing where that is possible, by running where it is not."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from djinn_lib_graph.capture import capture
from djinn_lib_graph.graph import RecordedGraph
from torch.export import ExportedProgram
from torch.nn.utils.stateless import _reparametrize_module

from djinn import runtime
from djinn.errors import ConfigurationError, SessionClosedError
from djinn.tensor import LazyTensor
from djinn_source_fx.reading import given_to_module, given_to_program
from djinn_source_fx.rehearsal import Rehearsal
from djinn_source_fx.remote_terms import InRemoteTerms, OnRemote
from djinn_source_fx.replaying import FxGraph, replay
from djinn_source_fx.tracing import named_state, tensors_within, trace, with_tensors


class GraphBuilder:
    """Makes graphs in the terms of what lazy tensors record, whatever they come from.

    Modes are the caller's: under ``torch.no_grad()`` composites stay whole, with gradients they are taken apart.

    Concurrency:
        A model is not to be used by another thread meanwhile.
    """

    def build_from_model(self, model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> RecordedGraph:
        """Make the graph of one call of a model.

        The model is traced, which needs no data and computes nothing. Where that fails, because control flow depends
        on data for one, the call is carried out on the remote device, and the graph is what it has recorded.

        Args:
            model: The model; its weights may be anywhere, on the meta device too as long as it can be traced.
            *args: Its inputs. Neither they nor the model are changed by tracing.
            **kwargs: Its inputs by name.

        Returns:
            A graph of the ``backend_type`` ``fx``, or ``lazy_dag`` with the ``fallback_reason``.

        Raises:
            Exception: What the model raises when it is run.
        """
        rehearsal = Rehearsal(runtime.current())
        try:
            traced = trace(rehearsal, model, args, kwargs)
            return replay(rehearsal, traced.module, traced.given, type(model).__name__, OnRemote(rehearsal))
        except SessionClosedError:
            # Whoever asks by way of the running session hears that it does not know the tensor.
            reason = "The model asks for the values of a tensor while it is traced."
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the reason that is kept
            reason = f"{type(error).__name__}: {_first_line(error)}"
        return attrs.evolve(self._run(model, args, kwargs), fallback_reason=reason)

    def build_from_fx(self, source: torch.fx.GraphModule | ExportedProgram, *args: Any, **kwargs: Any) -> FxGraph:
        """Make the graph of what a tracer of PyTorch has made.

        Args:
            source: A graph of ``symbolic_trace`` or ``make_fx``, one that Dynamo has given to a backend, or an exported
                program.
            *args: Examples for the placeholders, in order, of which only metadata matters. Exported programs need none,
                nor do graphs of Dynamo.
            **kwargs: Examples by name.

        Raises:
            ConfigurationError: It is something else, or there is no example for a placeholder.
            UnsupportedTensorError: The graph depends on data.
        """
        rehearsal = Rehearsal(runtime.current())
        if isinstance(source, ExportedProgram):
            return replay(rehearsal, source.graph_module, list(given_to_program(source)),
                          _class_of(source.graph_module), InRemoteTerms(rehearsal))
        if not isinstance(source, torch.fx.GraphModule):
            raise ConfigurationError(f"A {type(source).__name__} is no graph of torch.fx.",
                                     hint="Give a GraphModule or an ExportedProgram; for models, build_from_model.")
        # Dynamo does not say of which model a graph is.
        root = source._get_name().removeprefix("GraphModule")
        return replay(rehearsal, source, list(given_to_module(source, args, kwargs)), root, InRemoteTerms(rehearsal))

    @staticmethod
    def _run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedGraph:
        """Run a model on the remote device, on copies of its inputs; the model itself stays where it is."""
        state = dict(named_state(model))
        lazy = {id(tensor): _remote(tensor) for tensor in (*state.values(), *tensors_within((args, kwargs)))}
        call_args, call_kwargs = with_tensors((args, kwargs), lazy, model)
        moved = {name: lazy[id(tensor)] for name, tensor in state.items()}
        with _reparametrize_module(model, moved), capture(model) as captured:
            model(*call_args, **call_kwargs)
        graph: RecordedGraph = captured.graph
        return graph


def _remote(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the remote device, which is to autograd what the tensor is."""
    copied = tensor.detach().clone() if isinstance(tensor, LazyTensor) else runtime.current().upload(tensor)
    return copied.requires_grad_() if tensor.requires_grad else copied


def _class_of(module: torch.fx.GraphModule) -> str:
    """Name the class of an exported model: the outermost module of any node."""
    stacks = (node.meta.get("nn_module_stack") for node in module.graph.nodes)
    first = next((stack for stack in stacks if stack), None)
    return str(next(iter(first.values()))[1]).rpartition(".")[2] if first else ""


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
