"""Cases of training, carried out eagerly and on the remote device, and what is known to differ."""

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
from djinn_conformance.journal import Journal, expect_same_journals, kept
from djinn_conformance.specs import SpecError, folder, is_running, not_blank

__all__ = ("Case", "Expectation", "OptimizerSpec", "SchedulerSpec", "TrainingSpec", "check_all", "training_spec")

_SEED = 4711
_ROUNDING: Tolerance = {torch.float32: (2e-5, 1e-6), torch.float64: (1e-12, 1e-13), torch.bfloat16: (4e-2, 4e-2),
                        torch.float16: (4e-3, 4e-3), torch.complex64: (2e-5, 1e-6)}
"""What a sum of few numbers in another order, or with another accumulator, may differ by."""


@attrs.frozen
class Case:
    """One sample in one setting.

    Attributes:
        suite, name, variant, dtype, direction: See `djinn_conformance.tally.record`.
        sample: What tells samples of one variant apart.
        procedure: What is done, on the journal's device, and written into the journal.
    """

    suite: str
    name: str
    variant: str
    dtype: str
    direction: str
    sample: str
    procedure: Callable[[Journal], None]

    def __str__(self) -> str:
        return f"{self.suite}/{self.name}/{self.variant}/{self.dtype}/{self.direction}/{self.sample}"

    @property
    def group(self) -> dict[str, str]:
        """What is counted together."""
        return {"suite": self.suite, "name": self.name, "variant": self.variant, "dtype": self.dtype,
                "direction": self.direction}


@attrs.frozen
class Expectation:
    """Cases that are known to differ from eager."""

    case: str = attrs.field(validator=not_blank)
    """``suite/name/variant/dtype/direction/sample``, with wildcards as in file names."""
    status: Literal["differs", "refused", "rounds"]
    """Whether all of them differ, are refused where eager refuses nothing or otherwise, or some differ by rounding."""
    reason: str = attrs.field(validator=not_blank)
    link: str = attrs.field(validator=not_blank)
    """Where that can be read: an address, or a file."""
    torch: str = ""
    """Releases of PyTorch, as a version specifier; empty for all."""
    device: str = "cpu"
    """Type of the executor's device; empty for all."""
    session: Literal["", "served", "in process"] = ""
    """Where the executor is; empty for everywhere."""

    def covers(self, case: Case, device: str, session: str) -> bool:
        """Whether it speaks of a case, on a type of device, of a session, in the release of PyTorch that is running."""
        return fnmatchcase(str(case), self.case) and self.applies(device, session)

    def applies(self, device: str, session: str) -> bool:
        """Whether it speaks of a type of device and a session, in the release of PyTorch that is running."""
        is_release = is_running(self.torch)
        return is_release and self.device in ("", device) and self.session in ("", session)


@attrs.frozen
class OptimizerSpec:
    """What an optimizer is driven with where that is not the rule.

    Attributes:
        name: Its class.
        shapes: Of its parameters.
        dtypes: Of its parameters.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: tuple[str, ...] | None = None


@attrs.frozen
class SchedulerSpec:
    """How a learning-rate scheduler is driven.

    Attributes:
        name: Its class.
        arguments: Plain ones.
        powers: Arguments that are functions of the epoch, by their base.
        schedulers: Others that it combines, in the argument ``schedulers``.
        takes_metric: Whether a step takes a metric.
    """

    name: str
    arguments: dict[str, Any] = attrs.field(factory=dict)
    powers: dict[str, float] = attrs.field(factory=dict)
    schedulers: tuple[str, ...] = ()
    takes_metric: bool = False


@attrs.frozen
class TrainingSpec:
    """What is trained, how, and what is known to differ.

    Attributes:
        steps: How many steps each case makes.
        shapes: Of the parameters that optimizers get.
        dtypes: Of these parameters.
        module_dtypes: Dtypes of modules, where PyTorch's database lists them.
        optimizers: Exceptions to ``shapes`` and ``dtypes``.
        schedulers: Every class of ``torch.optim.lr_scheduler``.
        expectations: What is known to differ.
    """

    steps: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    module_dtypes: tuple[str, ...]
    schedulers: tuple[SchedulerSpec, ...]
    optimizers: tuple[OptimizerSpec, ...] = ()
    expectations: tuple[Expectation, ...] = ()

    def optimizer(self, name: str) -> OptimizerSpec:
        """Return what an optimizer is driven with."""
        own = next((spec for spec in self.optimizers if spec.name == name), OptimizerSpec(name))
        return OptimizerSpec(name, own.shapes or self.shapes, own.dtypes or self.dtypes)


@lru_cache(maxsize=1)
def training_spec() -> TrainingSpec:
    """Read ``specs/training.toml``.

    Raises:
        SpecError: Names every fault.
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
    """Decides case by case, and remembers what is not as expected."""

    eager: torch.device
    remote: torch.device
    session: str
    faults: list[str] = attrs.field(factory=list)
    met: set[Expectation] = attrs.field(factory=set)

    def outcome(self, case: Case) -> str:
        """Carry a case out on both devices: ``equal``, ``different`` as expected, or a ``fault``."""
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
    """Carry out every case on both devices, record the counts, and fail with a list of all that is not as expected.

    Args:
        suite: Which the cases are of.
        cases: Those of one group follow one another.
        eager: Where eager decides.
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


def _journals(case: Case, eager: torch.device, remote: torch.device) -> tuple[Journal, Journal]:
    """Carry out a case with the same random numbers on both devices."""
    journals = []
    for device in (remote, eager):
        torch.manual_seed(_SEED)
        journals.append(kept(case.procedure, device))
    return journals[0], journals[1]


def _difference(case: Case, journals: tuple[Journal, Journal], tolerance: Tolerance | None = None) -> str:
    """Say what differs."""
    try:
        expect_same_journals(*journals, str(case), tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def _unexpected(case: Case, expected: Expectation, journals: tuple[Journal, Journal]) -> str:
    """Say in what a difference is not the one that is expected."""
    if expected.status == "rounds":
        return _difference(case, journals, _ROUNDING)
    is_refused = type(journals[0].raised) is not type(journals[1].raised)
    if is_refused != (expected.status == "refused"):
        return f"{_difference(case, journals)}: the expected status is {expected.status}"
    return ""
