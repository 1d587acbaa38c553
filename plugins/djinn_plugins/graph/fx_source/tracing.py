"""Traces a model into a graph of ``torch.fx``, on the same path as a normal call.

``make_fx`` traces below the level that a model can observe: with lazy tensors without values, no flag shows that
tracing is active, and no tensor is a proxy. Models that behave differently for tracers, as those of transformers do
with attention masks, are traced as they normally run.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from djinn.ir.spec import tensors_in
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.graph.fx_source.device_remap import OnRemote, is_special
from djinn_plugins.graph.fx_source.dry_run import Beside, DryRunSession
from djinn_plugins.graph.fx_source.places import STACK, followed
from djinn_plugins.graph.fx_source.replaying import Given
from djinn_plugins.graph.graph import ValueInfo
from djinn_plugins.graph.returned import Returned, returned_by


@attrs.frozen
class Traced:
    """A traced call of a model."""

    module: torch.fx.GraphModule
    given: list[Given]
    """The values of its placeholders: the model's state, then the tensors of its inputs."""
    returned: Returned | None
    """What the call returned, with positions among the module's results in place of tensors."""


def trace(rehearsal: DryRunSession, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """Trace a call of a model. Nothing is computed, and neither the model nor the inputs are changed.

    Raises:
        UnsupportedTensorError: The model reads values, or a size depends on them.
        Exception: The error of the model or of the tracer.
    """
    given: dict[int, Given] = {}
    returned: list[Returned | None] = []
    # Tied weights, and inputs that are passed twice, are one tensor.
    for tensor, info in (*_state_of(model), *_inputs_of(model, args, kwargs)):
        given.setdefault(id(tensor), Given(tensor, info))

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        replaced = dict(zip(given, tensors, strict=True))
        state = {name: replaced[id(tensor)] for name, tensor in named_state(model)}
        call_args, call_kwargs = with_tensors((tuple(args), dict(kwargs)), replaced, model)
        with _reparametrize_module(model, state), _Keeping() as kept:
            result = model(*call_args, **call_kwargs)
        kept.update((id(tensor), tensor) for tensor in tensors_within(result))
        positions = {identity: (str(position), None) for position, identity in enumerate(kept)}
        returned.append(returned_by(result, lambda tensor: positions.get(id(tensor))))
        # The tracer would remove values that are not returned, including some that lazy tensors record.
        return list(kept.values())

    stand_ins = [_like(rehearsal.stand_in(item.value), item.value) for item in given.values()]
    with _Tracing(rehearsal), Beside(rehearsal), _noting_places(model):
        module = make_fx(call, tracing_mode="real", pre_dispatch=True)(*stand_ins)
    return Traced(module, list(given.values()), returned[-1])


def with_tensors(item: Any, replaced: Mapping[int, Any], model: torch.nn.Module) -> Any:
    """Copy nested inputs, including objects such as caches, with some tensors replaced.

    Args:
        item: The inputs.
        replaced: The new tensors, by identity of the ones they replace. They are remote, and objects that store their
            tensors' device get the remote one.
        model: Is referred to, not copied.
    """
    remote = devices.logical_device()
    moved = {id(found): remote for found in _within(item, set()) if isinstance(found, torch.device)}
    return copy.deepcopy(item, {**moved, **replaced, id(model): model})


def tensors_within(item: Any) -> Iterator[torch.Tensor]:
    """List the tensors in nested inputs, including those in objects."""
    return (found for found in _within(item, set()) if isinstance(found, torch.Tensor))


def _within(item: Any, seen: set[int]) -> Iterator[torch.Tensor | torch.device]:
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, (torch.Tensor, torch.device)):
        yield item
    elif isinstance(item, Mapping):
        for member in item.values():
            yield from _within(member, seen)
    elif isinstance(item, (list, tuple, set)):
        for member in item:
            yield from _within(member, seen)
    elif not isinstance(item, (torch.nn.Module, type)) and hasattr(item, "__dict__"):
        yield from _within(vars(item), seen)


def named_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters and buffers; those with several names are listed under each of them."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _state_of(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, ValueInfo]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in named_state(model):
        yield tensor, ValueInfo(name, "parameter" if name in parameters else "buffer")


def _inputs_of(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, ValueInfo]]:
    """Name the inputs as `djinn.capture` does; tensors in objects have no names."""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        names = []
    named = [(names[position] if position < len(names) else str(position), item) for position, item in enumerate(args)]
    for name, item in (*named, *kwargs.items()):
        yield from ((tensor, ValueInfo(path, "input")) for path, tensor in _paths(name, item))
    yield from ((tensor, ValueInfo()) for tensor in tensors_within((tuple(args), dict(kwargs))))


def _paths(name: str, item: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        yield name, item
    elif isinstance(item, (list, tuple)):
        for position, member in enumerate(item):
            yield from _paths(f"{name}.{position}", member)
    elif isinstance(item, Mapping):
        for key, member in item.items():
            yield from _paths(f"{name}.{key}", member)


def _like(stand_in: LazyTensor, tensor: torch.Tensor) -> torch.Tensor:
    return stand_in.requires_grad_(tensor.requires_grad) if tensor.requires_grad else stand_in


@contextlib.contextmanager
def _noting_places(model: torch.nn.Module) -> Iterator[None]:
    """Record with every traced node which modules were running."""

    def moved(stack: dict[str, tuple[str, Any]]) -> None:
        traceback.get_current_meta()[STACK] = stack

    with traceback.preserve_node_meta(), followed(model, "", moved):
        yield


class _Tracing(OnRemote):
    """Traces a function that has a handler on the remote device as one node, independently of its implementation."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and record the call itself if its operations are not recorded otherwise."""
        mode = get_proxy_mode()
        tracer = None if mode is None else mode.tracer
        if not isinstance(tracer, PythonKeyTracer) or not is_special(function) or not any(
            isinstance(tensor, LazyTensor) for tensor in tensors_in((args, tuple(kwargs.values())))
        ):
            return super().call(function, args, kwargs)
        proxies = pytree.tree_map_only(torch.Tensor, tracer.unwrap_proxy, (args, kwargs))
        with disable_proxy_modes_tracing():
            made = function(*args, **kwargs)
            proxy = tracer.create_proxy("call_function", function, *proxies)
            return track_tensor_tree(made, proxy, constant=None, tracer=tracer)


class _Keeping(TorchFunctionMode):
    """Keeps every tensor that a PyTorch function returns."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped there
        return self._kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(item, torch.Tensor):
                self._kept[id(item)] = item
        return result
