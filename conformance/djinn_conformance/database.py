"""PyTorch's own database of operator samples (``op_db``), compared sample by sample with eager.

A unit of work is one entry of the database in one dtype and one direction; `judge` goes through all of its samples. It
runs in a separate process (`djinn_conformance.workers`), because kernels may end a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import attrs
import torch

from djinn.errors import UnknownOperatorError, UnsupportedTensorError
from djinn.session import runtime
from djinn_conformance.remote_calls import compare, copies, sent
from djinn_conformance.seeding import undisturbed

__all__ = ("DTYPES", "STATUSES", "Difference", "Direction", "Unit", "Verdict", "judge", "operators", "units")

DTYPES = ("float32", "float64", "bfloat16", "complex64", "int64", "bool")
"""Dtypes in which operators are run forward."""
BACKWARD_DTYPES = ("float32",)
"""Dtypes in which gradients are compared."""
MOST_ELEMENTS = 1 << 17
"""Samples with more elements than this are left out."""
_SEED = 20_261
_CPU = torch.device("cpu")
_SHOWN = 400
_RETRIES = 8
"""How often eager is checked for agreement with itself, three times each."""


STATUSES = {
    "values": "elements differ",
    "rounding": "elements differ by no more than torch.testing.assert_close allows for the dtype",
    "unstable": "elements differ, and eager itself gives other ones each time",
    "uninitialised": "elements differ, because nobody has written them",
    "metadata": "size, stride, storage offset, dtype or type differs",
    "unsupported": "raises UnsupportedTensorError, or UnknownOperatorError, where eager gives a result",
    "refused": "raises something else where eager gives a result",
    "accepted": "gives a result where eager raises",
    "raised": "raises another exception than eager",
    "aborted": "ends the process",
    "hung": "does not come back",
}
"""Ways in which an outcome may differ from eager's."""


class Direction(StrEnum):
    """The compared direction."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ERRORS = "errors"


@attrs.frozen
class Unit:
    """One entry of the database, in one dtype and one direction."""

    operator: str
    """Name of the entry, with its variant after a dot."""
    dtype: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} {self.direction}"


@attrs.frozen
class Difference:
    """A sample whose outcome differs from eager's."""

    sample: int
    """Position among the unit's samples."""
    status: str
    """One of `STATUSES`."""
    message: str


@attrs.define
class Verdict:
    """The result of a unit."""

    total: int = 0
    left_out: int = 0
    """Samples that are too large."""
    differences: list[Difference] = attrs.field(factory=list)


@lru_cache(maxsize=1)
def operators() -> dict[str, Any]:
    """Load the database; by name, in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {(f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name): op for op in op_db}


def units(operator: str) -> list[Unit]:
    """List what the database offers for one of its entries."""
    op = operators()[operator]
    supported = op.supported_dtypes("cpu")
    found = [Unit(operator, name, Direction.FORWARD) for name in DTYPES if getattr(torch, name) in supported]
    if op.supports_autograd:
        differentiable = op.supported_backward_dtypes("cpu")
        found += [Unit(operator, name, Direction.BACKWARD) for name in BACKWARD_DTYPES
                  if getattr(torch, name) in differentiable]
    if op.error_inputs_func is not None:
        found.append(Unit(operator, "float32", Direction.ERRORS))
    return found


def judge(unit: Unit, device: torch.device, chosen: Callable[[int], bool] = lambda _: True) -> Verdict:
    """Run the samples of a unit eagerly and on the remote device, and return where outcomes differ.

    Args:
        unit: What to run.
        device: The remote device.
        chosen: The samples to run, by position.
    """
    verdict = Verdict()
    with undisturbed():
        torch.manual_seed(_SEED)
        for index, (op, sample) in enumerate(_samples(unit)):
            if not chosen(index):
                continue
            if sum(tensor.numel() for tensor in _tensors((sample.input, sample.args, sample.kwargs))) > MOST_ELEMENTS:
                verdict.left_out += 1
                continue
            verdict.total += 1
            difference = _judge_sample(unit, op, sample, device)
            if difference is not None:
                verdict.differences.append(Difference(index, *difference))
    return verdict


def _samples(unit: Unit) -> Iterator[tuple[Any, Any]]:
    op = operators()[unit.operator]
    dtype = getattr(torch, unit.dtype)
    if unit.direction is Direction.ERRORS:
        yield from ((op, wrong.sample_input) for wrong in op.error_inputs("cpu"))
    else:
        needs_gradient = unit.direction is Direction.BACKWARD
        yield from ((op, sample) for sample in op.sample_inputs("cpu", dtype, requires_grad=needs_gradient))


@attrs.frozen
class _Outcome:
    """The result of a call, and its arguments afterwards."""

    result: Any = None
    arguments: Sequence[torch.Tensor] = ()
    gradients: Any = None
    raised: Exception | None = None


def _judge_sample(unit: Unit, op: Any, sample: Any, device: torch.device) -> tuple[str, str] | None:
    call = (sample.input, sample.args, sample.kwargs)
    state = torch.get_rng_state()
    try:
        wanted = _run(unit, op, sample, copies(call))
        found = _difference(_run(unit, op, sample, sent(call, device), device), wanted)
        if found is None:
            return None
        status, message = found
        if status == "values":
            status = _refined(unit, op, sample, call, wanted, device)
        return status, f"{message[:2 * _SHOWN]} [{str(sample)[:_SHOWN]}]"
    finally:
        torch.set_rng_state(state)


def _refined(unit: Unit, op: Any, sample: Any, call: Any, wanted: _Outcome, device: torch.device) -> str:
    """Classify a difference in elements, by repeating the whole sample."""
    for fill in (1.0, float("nan"), -2.0) * _RETRIES:
        again = _run(unit, op, sample, _scribbled(call, fill))
        if not _is_close(again, wanted, exactly=True):
            return "unstable"
    got = _run(unit, op, sample, sent(call, device), device)
    return "rounding" if _is_close(got, wanted, exactly=False) else "values"


def _scribbled(call: Any, fill: float) -> Any:
    """Copy a call's arguments, and fill memory that the next allocations will reuse with a pattern."""
    made = copies(call)
    del [torch.full((size,), fill) for size in (1, 4, 16, 64, 256, 1024, 4096)][:]
    return made


def _is_close(got: _Outcome, wanted: _Outcome, *, exactly: bool) -> bool:
    mine, theirs = (_tensors((outcome.result, outcome.gradients, outcome.arguments)) for outcome in (got, wanted))
    tolerance = 0.0 if exactly else None
    try:
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=tolerance, atol=tolerance,
                                       equal_nan=True)
    except (AssertionError, ValueError):
        return False
    return True


def _run(unit: Unit, op: Any, sample: Any, call: Any, device: torch.device = _CPU) -> _Outcome:
    tensor, args, kwargs = call
    torch.manual_seed(_SEED)
    try:
        with device:
            result = op(tensor, *args, **kwargs)
            gradients = _gradients(sample, result, call) if unit.direction is Direction.BACKWARD else None
        if device != _CPU:
            runtime.current().synchronize()
    except Exception as error:  # noqa: BLE001  # any exception is the outcome
        return _Outcome(raised=error)
    return _Outcome(result, _tensors(call), gradients)


def _gradients(sample: Any, result: Any, call: Any) -> Any:
    outputs = [tensor for tensor in _tensors(sample.output_process_fn_grad(result)) if tensor.requires_grad]
    inputs = [tensor for tensor in _tensors(call) if tensor.requires_grad]
    if not outputs or not inputs:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    cotangents = [torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype).to(tensor.device)
                  for tensor in outputs]
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)


def _tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return [tensor for member in members for tensor in _tensors(member)]


def _difference(got: _Outcome, wanted: _Outcome) -> tuple[str, str] | None:
    if got.raised is not None or wanted.raised is not None:
        return _difference_of_errors(got.raised, wanted.raised)
    for values, status in ((False, "metadata"), (True, "values")):
        try:
            compare(got.result, wanted.result, "result", status, values=values)
            compare(got.gradients, wanted.gradients, "gradient", status, values=values)
            compare(got.arguments, wanted.arguments, "argument", status, values=values)
        except AssertionError as error:
            return status, str(error)
        except Exception as error:  # noqa: BLE001  # an error at the last moment is an outcome too
            return _difference_of_errors(error, None)
    return None


def _difference_of_errors(got: Exception | None, wanted: Exception | None) -> tuple[str, str] | None:
    if wanted is None:
        status = "unsupported" if isinstance(got, (UnsupportedTensorError, UnknownOperatorError)) else "refused"
        return status, f"{type(got).__name__}: {got}"
    if got is None:
        return "accepted", f"eager raises {type(wanted).__name__}: {wanted}"
    if type(got) is not type(wanted):
        return "raised", f"{type(got).__name__}: {got}; eager raises {type(wanted).__name__}: {wanted}"
    return None
