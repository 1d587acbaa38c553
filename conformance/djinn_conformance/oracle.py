"""The oracle: eager PyTorch, call by call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch

from djinn_conformance.programs import RecordedCall, Recording, Ref, fill, new_results, refs_in, written_refs

__all__ = ("Outcome", "Poison", "copied", "has_eager_stream", "perform", "run_contained", "run_eager", "seeded")


@attrs.frozen
class Poison:
    """A value that could not be computed, and the failures that may be reported as the reason."""

    failures: frozenset[int]


@attrs.define
class Outcome:
    """The results of a recording.

    Attributes:
        values: By index, results and inputs alike: a tensor, a plain value, or `Poison`.
        raised: For each step that raised, by position: the exception.
    """

    values: dict[int, Any]
    raised: dict[int, Exception] = attrs.field(factory=dict)


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy an input to a device with its whole storage, so that stride and offset are preserved."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((length,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of a device, and restore them afterwards.

    ``torch.manual_seed`` and ``fork_rng`` would affect every device's generator, including remote ones.
    """
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], device)


def run_eager(recording: Recording, device: torch.device, seed: int | None = None) -> Outcome:
    """Run every call; none of them may raise.

    Args:
        recording: The calls.
        device: The device.
        seed: Seeds the process's generators first; they are restored afterwards.
    """
    with torch.no_grad(), nullcontext() if seed is None else seeded(device, seed):
        values: dict[int, Any] = {-1 - index: copied(tensor, device) for index, tensor in enumerate(recording.inputs)}
        produced = 0
        for made in recording.calls:
            for result in perform(made, values, device):
                values[produced] = result
                produced += 1
    return Outcome(values)


def perform(made: RecordedCall, values: Mapping[int, Any], device: torch.device) -> list[Any]:
    """Execute one call on known values and list its new results."""
    args = fill(made.args, lambda ref: values[ref.index], device)
    kwargs = fill(made.kwargs, lambda ref: values[ref.index], device)
    return new_results(made.operator, made.operator(*args, **kwargs))


def run_contained(
    recording: Recording, device: torch.device, poisoned: Mapping[int, int] | None = None
) -> Outcome:
    """Run every call as an executor must if some of them raise.

    Args:
        recording: The calls.
        device: The device.
        poisoned: Inputs that are poison from the beginning, by index, with their failure.

    Returns:
        Values and exceptions. A step that raises is failure ``-1 - position``.
    """
    with torch.no_grad():
        values: dict[int, Any] = {-1 - index: copied(tensor, device) for index, tensor in enumerate(recording.inputs)}
        values |= {index: Poison(frozenset({failure})) for index, failure in (poisoned or {}).items()}
        outcome = Outcome(values)
        produced = 0
        for position, made in enumerate(recording.calls):
            for result in _step(made, position, outcome, device):
                values[produced] = result
                produced += 1
    return outcome


def _step(made: RecordedCall, position: int, outcome: Outcome, device: torch.device) -> list[Any]:
    values = outcome.values
    reasons = [value.failures for ref in refs_in([made.args, made.kwargs])
               if isinstance(value := values[ref.index], Poison)]
    if reasons:
        poison = Poison(frozenset().union(*reasons))
        _spread(poison, written_refs(made), values)
        return [poison] * made.results
    try:
        return perform(made, values, device)
    except Exception as error:  # noqa: BLE001  # the executor must report any exception of eager
        outcome.raised[position] = error
        return [Poison(frozenset({-1 - position}))] * made.results


def _spread(poison: Poison, written: list[Ref], values: dict[int, Any]) -> None:
    """Poison all values that share storage with one that a skipped step would have written."""
    storages = {_storage(values[ref.index]) for ref in written if isinstance(values[ref.index], torch.Tensor)}
    for ref in written:
        if isinstance(known := values[ref.index], Poison):
            values[ref.index] = Poison(known.failures | poison.failures)
    for index, value in values.items():
        if isinstance(value, torch.Tensor) and _storage(value) in storages:
            values[index] = poison


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def has_eager_stream(device: torch.device) -> bool:
    """Whether PyTorch itself draws random numbers on a device."""
    try:
        torch.Generator(device)
        torch.empty((), device=device).uniform_()
    except (RuntimeError, NotImplementedError, AssertionError):
        return False
    return True
