"""Laws and their tests: each law has exactly one test, each test exactly one law."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import InvalidArgument

from djinn_conformance.specs import KindSpec, law_named

__all__ = ("PROFILES", "ProfileError", "active_profile", "as_found", "is_cursory", "is_thorough", "law", "law_of",
           "laws_by_test", "mismatches")

Test = TypeVar("Test", bound=Callable[..., None])
_ATTRIBUTE = "djinn_law"


class ProfileError(ValueError):
    """``HYPOTHESIS_PROFILE`` names a profile that does not exist."""


def _profile(examples: int, **options: Any) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        **options,
    )


PROFILES: Mapping[str, settings] = {
    "smoke": _profile(25, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)),
    "dev": _profile(200),
    "ci": _profile(75, derandomize=True, database=None),
    "full": _profile(200, derandomize=True, database=None),
    "nightly": _profile(5000, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)),
}
"""How thorough a run is, by the value of ``HYPOTHESIS_PROFILE``."""
_THOROUGH = ("full", "nightly")


def is_thorough() -> bool:
    """Whether suites go through a whole collection, rather than a sample of it."""
    return os.environ.get("HYPOTHESIS_PROFILE") in _THOROUGH


def is_cursory() -> bool:
    """Whether only a few of a collection's members are tested."""
    return os.environ.get("HYPOTHESIS_PROFILE") == "smoke"


def active_profile() -> settings:
    """Return the profile that ``HYPOTHESIS_PROFILE`` chooses; ``dev`` if it is unset.

    Raises:
        ProfileError: There is no such profile.
    """
    name = os.environ.get("HYPOTHESIS_PROFILE") or "dev"
    if name not in PROFILES:
        raise ProfileError(f"HYPOTHESIS_PROFILE={name!r}: there are {', '.join(PROFILES)}.")
    return PROFILES[name]


def as_found(profile: settings) -> settings:
    """Report a failing example of a derandomized run as found; shrinking it takes longer than a test may."""
    if not profile.derandomize:
        return profile
    return settings(profile, phases=[phase for phase in profile.phases if phase not in (Phase.shrink, Phase.explain)])


def law(identity: str, *, effort: float = 1.0, shrinks: bool = True) -> Callable[[Test], Test]:
    """Bind a test to the law that it tests.

    Args:
        identity: The law, ``kind.name``. A test written with Hypothesis gets the active profile.
        effort: Share of the profile's examples that it runs.
        shrinks: Whether a derandomized run shrinks a failing example, which is slow.

    Raises:
        SpecError: No specification has that law.
    """
    law_named(identity)

    def bind(test: Test) -> Test:
        if getattr(test, "is_hypothesis_test", False):
            try:
                profile = active_profile() if shrinks else as_found(active_profile())
                test = settings(profile, max_examples=max(1, round(profile.max_examples * effort)))(test)
            except InvalidArgument as error:
                raise TypeError(f"{identity}: put @law above every decorator of Hypothesis") from error
        setattr(test, _ATTRIBUTE, identity)
        return test

    return bind


def law_of(test: object) -> str | None:
    """Return the law of a test function."""
    found = getattr(test, _ATTRIBUTE, None)
    return found if isinstance(found, str) else None


def laws_by_test(*modules: str) -> dict[str, str | None]:
    """Map the tests of modules, given by name, to their laws."""
    return {name: law_of(value) for module in modules for name, value in vars(import_module(module)).items()
            if name.startswith("test_")}


def mismatches(spec: KindSpec, tests: Mapping[str, str | None]) -> Iterable[str]:
    """List where the laws of a kind and the tests of its suite do not correspond one to one."""
    bound: dict[str, list[str]] = {}
    for test, identity in tests.items():
        if identity is None:
            yield f"test {test} of the kind {spec.kind} tests no law"
        else:
            bound.setdefault(identity, []).append(test)
    known = {law.id for law in spec.laws}
    for identity, names in bound.items():
        if identity not in known:
            yield f"test {names[0]} tests {identity}, which is no law of the kind {spec.kind}"
        if len(names) > 1:
            yield f"law {identity} is tested by {' and '.join(names)}; it must be one"
    for missing in sorted(known - set(bound)):
        yield f"law {missing} has no test"
