"""First and second derivatives of recorded calls, in this process and on the remote device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_leaves

from djinn.session.session import Session
from djinn_conformance.families import OperatorSpec, domains
from djinn_conformance.oracle import copied, seeded
from djinn_conformance.programs import Recording, fill
from djinn_conformance.replays import Attempt
from djinn_conformance.strategies import filled

__all__ = ("derivatives", "derivatives_remotely", "differentiable")

_CPU = torch.device("cpu")


def differentiable(spec: OperatorSpec) -> list[OperatorSpec]:
    """Restrict an operator to dtypes that have gradients; some operators have none."""
    dtypes = tuple(dtype for dtype in domains().dtypes["differentiable"] if getattr(torch, dtype) in spec.dtypes)
    return [attrs.evolve(spec, dtypes=domains().dtypes_named(*dtypes))] if dtypes else []


def derivatives(recording: Recording, order: int, seed: int) -> Attempt:
    """Differentiate a call in this process.

    Args:
        recording: One call.
        order: 1 or 2.
        seed: For the cotangents.
    """
    with seeded(_CPU, 0):
        return _attempt(recording, _CPU, order, seed)


def derivatives_remotely(recording: Recording, session: Session, order: int, seed: int, *, must_raise: bool) -> Attempt:
    """Differentiate a call on the remote device; see `djinn_conformance.replays.attempt_lazily`."""
    attempt = _attempt(recording, session.device, order, seed)
    if not must_raise or attempt.error is not None:
        return attempt
    try:
        session.synchronize()
    except Exception as error:  # noqa: BLE001  # any exception is the outcome that is compared
        return Attempt((), error)
    return attempt


def _attempt(recording: Recording, device: torch.device, order: int, seed: int) -> Attempt:
    [made] = recording.calls
    leaves = [_leaf(copied(tensor, device)) for tensor in recording.inputs]
    args, kwargs = (fill(item, lambda ref: leaves[-1 - ref.index], device) for item in (made.args, made.kwargs))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        given: Any = made.operator(*args, **kwargs)
        for turn in range(order):
            given = _pulled(given, wanted, device, seed + turn, create_graph=turn + 1 < order)
    except Exception as error:  # noqa: BLE001  # as above
        return Attempt((), error)
    return Attempt(tuple(given))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _pulled(
    outputs: Any, inputs: Sequence[torch.Tensor], device: torch.device, seed: int, *, create_graph: bool
) -> list[Any]:
    """Backpropagate separate cotangents from each output that depends on the inputs; ``None`` for the others."""
    depending = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not depending or not inputs:
        return [None] * len(inputs)
    cotangents = [filled(tuple(leaf.shape), leaf.dtype, seed).to(device) for leaf in depending]
    return list(torch.autograd.grad(depending, inputs, cotangents, create_graph=create_graph, allow_unused=True))
