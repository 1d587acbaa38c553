"""Test cases for training, run eagerly and on the remote device, and their known differences."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

import attrs
import cattrs
import torch

from djinn_conformance import tally
from djinn_conformance.assertions import Tolerance
from djinn_conformance.journal import EventLog, expect_same_journals, kept
from djinn_conformance.specs import SpecError, folder, is_running, not_blank

__all__ = (
    "Case", "OptimizerSpec", "SchedulerSpec", "TrainingExpectation", "TrainingSpec", "check_all", "training_spec",
)

_SEED = 4711
_ROUNDING: Tolerance = {torch.float32: (2e-5, 1e-6), torch.float64: (1e-12, 1e-13), torch.bfloat16: (4e-2, 4e-2),
                        torch.float16: (4e-3, 4e-3), torch.complex64: (2e-5, 1e-6)}
"""Permitted difference of a sum of few numbers with another order or accumulator."""


@attrs.frozen
class Case:
    """One sample in one setting.

    Attributes:
        suite, name, variant, dtype, direction: See `djinn_conformance.tally.record`.
        sample: Distinguishes samples of one variant.
        procedure: Runs on the journal's device, and records its results in the journal.
    """

    suite: str
    name: str
    variant: str
    dtype: str
    direction: str
    sample: str
    procedure: Callable[[EventLog], None]

    def __str__(self) -> str:
        return f"{self.suite}/{self.name}/{self.variant}/{self.dtype}/{self.direction}/{self.sample}"

    @property
    def group(self) -> dict[str, str]:
        """The fields by which cases are counted together."""
        return {"suite": self.suite, "name": self.name, "variant": self.variant, "dtype": self.dtype,
                "direction": self.direction}


@attrs.frozen
class TrainingExpectation:
    """Cases that are known to differ from eager."""

    case: str = attrs.field(validator=not_blank)
    """``suite/name/variant/dtype/direction/sample``, with wildcards as in file names."""
    status: Literal["differs", "refused", "rounds"]
    """Whether all of them differ, are refused (where eager accepts, or with another error), or some differ by
    rounding.
    """
    reason: str = attrs.field(validator=not_blank)
    link: str = attrs.field(validator=not_blank)
    """Source of the reason: an address, or a file."""
    torch: str = ""
    """Releases of PyTorch, as a version specifier; empty for all."""
    device: str = "cpu"
    """Type of the executor's device; empty for all."""
    session: Literal["", "served", "in process"] = ""
    """Where the executor is; empty for everywhere."""

    def covers(self, case: Case, device: str, session: str) -> bool:
        """Whether it applies to a case, on a type of device, in a session, with the running release of PyTorch."""
        return fnmatchcase(str(case), self.case) and self.applies(device, session)

    def applies(self, device: str, session: str) -> bool:
        """Whether it applies to a type of device and a session, with the running release of PyTorch."""
        is_release = is_running(self.torch)
        return is_release and self.device in ("", device) and self.session in ("", session)


@attrs.frozen
class OptimizerSpec:
    """Exceptions to the defaults for one optimizer.

    Attributes:
        name: Its class.
        shapes: Shapes of its parameters.
        dtypes: Dtypes of its parameters.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: tuple[str, ...] | None = None


@attrs.frozen
class SchedulerSpec:
    """How a learning-rate scheduler is tested.

    Attributes:
        name: Its class.
        arguments: Plain arguments.
        powers: Arguments that are functions of the epoch, by their base.
        schedulers: Other schedulers that it combines, in the argument ``schedulers``.
        takes_metric: Whether a step takes a metric.
    """

    name: str
    arguments: dict[str, Any] = attrs.field(factory=dict)
    powers: dict[str, float] = attrs.field(factory=dict)
    schedulers: tuple[str, ...] = ()
    takes_metric: bool = False


@attrs.frozen
class TrainingSpec:
    """The training cases, and their known differences.

    Attributes:
        steps: How many steps each case makes.
        shapes: Shapes of the optimizers' parameters.
        dtypes: Dtypes of these parameters.
        module_dtypes: Dtypes of modules, if PyTorch's database lists them.
        optimizers: Exceptions to ``shapes`` and ``dtypes``.
        schedulers: Every class of ``torch.optim.lr_scheduler``.
        expectations: Known differences.
    """

    steps: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    module_dtypes: tuple[str, ...]
    schedulers: tuple[SchedulerSpec, ...]
    optimizers: tuple[OptimizerSpec, ...] = ()
    expectations: tuple[TrainingExpectation, ...] = ()

    def optimizer(self, name: str) -> OptimizerSpec:
        """Return the settings for an optimizer."""
        own = next((spec for spec in self.optimizers if spec.name == name), OptimizerSpec(name))
        return OptimizerSpec(name, own.shapes or self.shapes, own.dtypes or self.dtypes)


@lru_cache(maxsize=1)
def training_spec() -> TrainingSpec:
    """Read ``specs/training.toml``.

    Raises:
        SpecError: The error names every fault.
    """
    text = (folder() / "training.toml").read_text(encoding="utf-8")
    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(tomllib.loads(text), TrainingSpec)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"training.toml: {error}") from None
    except cattrs.BaseValidationError as error:
        raise SpecError(f"training.toml: {'; '.join(cattrs.transform_error(error))}") from None


@attrs.define
class _Judge:
    """Judges cases, and collects unexpected results."""

    eager: torch.device
    remote: torch.device
    session: str
    faults: list[str] = attrs.field(factory=list)
    met: set[TrainingExpectation] = attrs.field(factory=set)

    def outcome(self, case: Case) -> str:
        """Run a case on both devices: ``equal``, ``different`` as expected, or a ``fault``."""
        expected = next((one for one in training_spec().expectations
                         if one.covers(case, self.eager.type, self.session)), None)
        journals = _journals(case, self.eager, self.remote)
        fault = _difference(case, journals)
        if not fault and (expected is None or expected.status == "rounds"):
            return "equal"
        if expected is None:
            self.faults.append(fault)
        elif not fault:
            self.faults.append(f"{case}: is equal, although {expected.case!r} is expected not to be")
        elif too_much := _unexpected(case, expected, journals):
            self.faults.append(too_much)
        else:
            self.met.add(expected)
            return "different"
        return "fault"


def check_all(
    suite: str, cases: Iterable[Case], eager: torch.device, remote: torch.device, *, session: str, thorough: bool
) -> None:
    """Run every case on both devices, record the counts, and fail with a list of all unexpected results.

    Args:
        suite: The suite of the cases.
        cases: The cases; those of one group are consecutive.
        eager: The device for the eager reference.
        remote: The logical device.
        session: Where its executor is, for the counts.
        thorough: Whether these are all cases, so that each expectation must be met.
    """
    __tracebackhide__ = True
    judge = _Judge(eager, remote, session)
    faults = judge.faults
    for group, members in groupby(cases, key=lambda case: case.group):
        outcomes = [judge.outcome(case) for case in members]
        tally.record(**group, session=session, equal=outcomes.count("equal"), different=outcomes.count("different"),
                     total=len(outcomes))
    for expected in training_spec().expectations if thorough else ():
        is_of_suite = expected.case.startswith(f"{suite}/") and expected.applies(eager.type, session)
        if is_of_suite and expected not in judge.met:
            faults.append(f"{expected.case}: nothing differs any more")
    if faults:
        raise AssertionError(f"{len(faults)} cases are not as expected:\n" + "\n".join(faults))


def _journals(case: Case, eager: torch.device, remote: torch.device) -> tuple[EventLog, EventLog]:
    """Run a case with the same random numbers on both devices."""
    journals = []
    for device in (remote, eager):
        torch.manual_seed(_SEED)
        journals.append(kept(case.procedure, device))
    return journals[0], journals[1]


def _difference(case: Case, journals: tuple[EventLog, EventLog], tolerance: Tolerance | None = None) -> str:
    """Describe the differences."""
    try:
        expect_same_journals(*journals, str(case), tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def _unexpected(case: Case, expected: TrainingExpectation, journals: tuple[EventLog, EventLog]) -> str:
    """Describe how a difference deviates from the expected one."""
    if expected.status == "rounds":
        return _difference(case, journals, _ROUNDING)
    is_refused = type(journals[0].raised) is not type(journals[1].raised)
    if is_refused != (expected.status == "refused"):
        return f"{_difference(case, journals)}: the expected status is {expected.status}"
    return ""
