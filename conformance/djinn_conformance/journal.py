"""Journals: the state that a procedure leaves on a device, step by step, compared with another device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_conformance.assertions import Tolerance, describe, expect_equal, expect_same_tensor, same_value, violated

__all__ = ("EventLog", "expect_same_journals", "kept")


@attrs.frozen
class _Tensor:
    """A snapshot of a tensor: its metadata, and a copy of its elements that later writes do not reach."""

    elements: torch.Tensor
    metadata: tuple[Any, ...]


@attrs.define
class EventLog:
    """The recorded events on one device.

    Attributes:
        device: The device.
        entries: The recorded values, in order.
        raised: The exception that ended the procedure.
    """

    device: torch.device
    entries: list[tuple[str, Any]] = attrs.field(factory=list)
    raised: Exception | None = None

    def note(self, what: str, value: Any) -> None:
        """Record the current state of a value, with members of containers one by one."""
        if isinstance(value, torch.Tensor):
            self.entries.append((what, _written_down(value, self.device)))
        elif isinstance(value, Mapping):
            self.entries.append((what, [str(key) for key in value]))
            for key, member in value.items():
                self.note(f"{what}[{key!r}]", member)
        elif isinstance(value, (list, tuple)):
            self.entries.append((what, len(value)))
            for index, member in enumerate(value):
                self.note(f"{what}[{index}]", member)
        elif isinstance(value, (bool, int, float, complex, str, type(None))):
            self.entries.append((what, value))
        else:
            self.entries.append((what, type(value).__qualname__))


def kept(procedure: Callable[[EventLog], None], device: torch.device) -> EventLog:
    """Run a procedure to its end or its exception, which may be raised at once or while waiting for the device."""
    journal = EventLog(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            procedure(journal)
            _wait(journal)
        except Exception as error:  # noqa: BLE001  # the exception is what is compared
            journal.raised = error
    return journal


def expect_same_journals(got: EventLog, wanted: EventLog, where: str, tolerance: Tolerance | None = None) -> None:
    """Check that the remote device ends in the same state as eager, bit for bit unless a tolerance is granted."""
    __tracebackhide__ = True
    if type(got.raised) is not type(wanted.raised):
        error = AssertionError(f"exception: got {got.raised!r:.300}, should be {wanted.raised!r:.300} [{where}]")
        raise error from got.raised
    if wanted.raised is None:
        expect_equal(len(got.entries), len(wanted.entries), "number of notes", where)
    for (name, mine), (wanted_name, theirs) in zip(got.entries, wanted.entries, strict=False):
        expect_equal(name, wanted_name, "what is noted", where)
        if not isinstance(mine, _Tensor) or not isinstance(theirs, _Tensor):
            if not same_value(mine, theirs):
                violated(name, got=describe(mine), wanted=describe(theirs), where=where)
            continue
        expect_equal(mine.metadata, theirs.metadata, f"metadata of {name}", where)
        expect_same_tensor(mine.elements.cpu(), theirs.elements.cpu(), name, where, tolerance)


def _written_down(tensor: torch.Tensor, device: torch.device) -> _Tensor:
    is_there = tensor.device.type == device.type or not tensor.dim()  # optimizers count steps on the CPU
    strided = tensor.layout is torch.strided
    has_elements = strided and tensor.numel() > 0
    metadata = (tensor.dtype, tensor.layout, tuple(tensor.shape), tensor.stride() if has_elements else None,
                tensor.storage_offset() if has_elements else None, tensor.requires_grad, tensor.is_leaf,
                isinstance(tensor, torch.nn.Parameter), is_there)
    with torch.no_grad():
        return _Tensor(tensor.detach().clone(), metadata)


def _wait(journal: EventLog) -> None:
    """Fetch all elements in one round trip."""
    lazy = [index for index, (_, value) in enumerate(journal.entries)
            if isinstance(value, _Tensor) and isinstance(value.elements, LazyTensor)]
    homes = runtime.current().materialize([journal.entries[index][1].elements for index in lazy])
    for index, home in zip(lazy, homes, strict=True):
        what, value = journal.entries[index]
        journal.entries[index] = what, attrs.evolve(value, elements=home)
