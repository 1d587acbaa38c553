"""Reads traced graphs, and determines the values of their placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from djinn.errors import ConfigurationError
from djinn_plugins.graph.fx_source.places import plain_path
from djinn_plugins.graph.fx_source.replaying import Given
from djinn_plugins.graph.graph import ValueInfo

_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}


def placeholders(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """List the placeholders of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def given_to_program(program: ExportedProgram) -> Iterator[Given]:
    """Return the values of an exported program's placeholders; its own examples supply the metadata."""
    state: Mapping[str, Any] = {**program.state_dict, **program.constants}
    for node, spec in zip(placeholders(program.graph_module), program.graph_signature.input_specs, strict=True):
        kind = _KINDS.get(spec.kind, "")
        name = spec.target if spec.target is not None and kind else node.name if kind else ""
        if isinstance(spec.arg, ConstantArgument):
            yield Given(spec.arg.value)
        else:
            # Tied weights are one tensor in the state dict under two names.
            value = state.get(spec.target or "")
            yield Given(_example(node) if value is None else value, ValueInfo(name, kind))


def given_to_module(module: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Given]:
    """Return the values of any other graph's placeholders.

    Args:
        module: The graph.
        args: Examples for its placeholders, in order. Dynamo's graphs have their own, and so do those of ``make_fx`` on
            fake tensors.
        kwargs: Examples by name.

    Raises:
        ConfigurationError: There is no example for a placeholder.
    """
    nodes = placeholders(module)
    if len(args) > len(nodes):
        raise ConfigurationError(f"The graph has {len(nodes)} placeholders and was given {len(args)} inputs.",
                                 hint="Give one for each, in order.")
    for position, node in enumerate(nodes):
        name, kind = _named(node)
        if position < len(args):
            value = args[position]
        elif str(node.target) in kwargs:
            value = kwargs[str(node.target)]
        elif _has_example(node):
            value = _example(node)
        elif node.args:
            value = node.args[0]
        else:
            raise ConfigurationError(f"There is no input for the placeholder {node.target!r}.",
                                     hint="Give examples for all of them; only their metadata is looked at.")
        yield Given(value, ValueInfo(name, kind))


def _named(node: torch.fx.Node) -> tuple[str, str]:
    """Return a placeholder's name; Dynamo makes placeholders of parameters and buffers, and records their source."""
    is_fixed = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return str(node.target), "input"
    path = source.name() if callable(source.name) else source.name
    if not is_fixed:
        return getattr(source, "local_name", plain_path(path)), "input"
    return plain_path(path), "parameter" if isinstance(_example(node), torch.nn.Parameter) else "buffer"


def _has_example(node: torch.fx.Node) -> bool:
    return "example_value" in node.meta or "val" in node.meta


def _example(node: torch.fx.Node) -> Any:
    """Return the value that a tracer has kept for a placeholder; for a dynamic size, the size during tracing."""
    value = node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value

