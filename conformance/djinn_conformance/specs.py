"""The laws of each plugin kind, read from ``specs/kinds``, and those of sessions, from ``specs/session.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ("SESSION", "KindSpec", "Law", "SpecError", "fault", "folder", "is_running", "kind_spec", "kinds",
           "law_named", "not_blank", "parse", "parse_kind", "suites")

_T = TypeVar("_T")
SESSION = "session"
"""The kind of sessions, which have laws as the plugin kinds do."""


class SpecError(ValueError):
    """A specification is malformed."""


def _identity(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not re.fullmatch(r"[a-z]+\.[a-z_]+", value):
        raise ValueError(f"{attribute.name} {value!r} is not of the form kind.name_of_law")


def _sentence(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not value.endswith(".") or ". " in value or not value.lstrip("`")[0].isalpha():
        raise ValueError(f"{attribute.name} {value!r} is not one sentence")


def not_blank(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Refuse a blank text, as a validator of attrs."""
    if not value.strip():
        raise ValueError(f"{attribute.name} is empty")


@attrs.frozen
class Law:
    """One property that every plugin of a kind has."""

    id: str = attrs.field(validator=_identity)
    """Stable identifier, ``kind.name``."""
    statement: str = attrs.field(validator=_sentence)
    """The property, in one sentence."""
    source: str = attrs.field(validator=not_blank)
    """Origin of the rule."""
    requires: tuple[str, ...] = ()
    """Capabilities without which the law does not apply."""
    oracle: str = ""
    """The reference for the comparison; empty if the statement is enough."""
    tolerance: Mapping[str, Any] = attrs.field(factory=dict)
    """``relaxed_by`` names a declared capability; then ``dtype = [relative, absolute]`` holds instead of equality."""

    @property
    def kind(self) -> str:
        """The plugin kind."""
        return self.id.partition(".")[0]


@attrs.frozen
class KindSpec:
    """The laws of one plugin kind."""

    kind: str
    protocol: str
    """Qualified name of the Protocol in ``djinn.kinds``."""
    summary: str = attrs.field(validator=_sentence)
    """What a plugin of this kind does."""
    laws: tuple[Law, ...]
    capabilities: Mapping[str, str] = attrs.field(factory=dict)
    """Capabilities that laws of this kind may require, and how a plugin gets each."""

    def __attrs_post_init__(self) -> None:
        identities = [law.id for law in self.laws]
        if len(identities) != len(set(identities)):
            raise ValueError(f"{self.kind}: a law is there twice")
        for law in self.laws:
            named = {*law.requires, *([law.tolerance["relaxed_by"]] if "relaxed_by" in law.tolerance else [])}
            if law.kind != self.kind:
                raise ValueError(f"{law.id} is no law of {self.kind}")
            if not named <= set(self.capabilities):
                raise ValueError(f"{law.id} requires {sorted(named - set(self.capabilities))}, described nowhere")


_converter = cattrs.Converter(forbid_extra_keys=True)


def fault(error: BaseException, _: type[object] | None) -> str:
    """Describe an invalid value, for ``cattrs.transform_error``."""
    return str(error) if isinstance(error, ValueError) else cattrs.v.format_exception(error, None)


def parse(text: str, origin: str, kind: type[_T], converter: cattrs.Converter = _converter) -> _T:
    """Parse a specification.

    Args:
        text: TOML.
        origin: Its origin, for messages.
        kind: The class that it describes.
        converter: Creates the object from TOML data.

    Raises:
        SpecError: The error names the origin and every fault.
    """
    try:
        return converter.structure(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{origin}: {error}") from None
    except cattrs.BaseValidationError as error:
        raise SpecError(f"{origin}: {'; '.join(cattrs.transform_error(error, format_exception=fault))}") from None


def parse_kind(text: str, origin: str) -> KindSpec:
    """Parse the specification of a kind; see `parse`."""
    return parse(text, origin, KindSpec)


def is_running(releases: str) -> bool:
    """Whether a version specifier matches the running release of PyTorch; an empty one matches all."""
    return Version(torch.__version__) in SpecifierSet(releases, prereleases=True)


def folder() -> Traversable:
    """Find the specifications: inside the installed package, or beside it in a checkout."""
    packaged = resources.files("djinn_conformance") / "specs"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).parents[2] / "specs"
    if checkout.is_dir():
        return checkout
    raise SpecError("The specifications are missing from this installation of djinn-torch; install it again.")


@lru_cache(maxsize=1)
def _all() -> Mapping[str, KindSpec]:
    listed = (entry for entry in (folder() / "kinds").iterdir() if entry.name.endswith(".toml"))
    files = [*sorted(listed, key=lambda entry: entry.name), folder() / f"{SESSION}.toml"]
    loaded = [(entry.name, parse_kind(entry.read_text(encoding="utf-8"), entry.name)) for entry in files]
    for name, spec in loaded:
        if name != f"{spec.kind}.toml":
            raise SpecError(f"{name} specifies the kind {spec.kind!r}; name it {spec.kind}.toml")
    return {spec.kind: spec for _, spec in loaded}


def kinds() -> tuple[str, ...]:
    """List the plugin kinds."""
    return tuple(kind for kind in _all() if kind != SESSION)


def suites() -> tuple[str, ...]:
    """List everything that has laws: the plugin kinds, and sessions."""
    return tuple(_all())


def kind_spec(kind: str) -> KindSpec:
    """Look up a kind.

    Raises:
        SpecError: It has no specification.
    """
    found = _all().get(kind)
    if found is None:
        raise SpecError(f"No specification of the kind {kind!r}; there are: {', '.join(suites())}.")
    return found


def law_named(identity: str) -> Law:
    """Look up a law.

    Raises:
        SpecError: No specification contains it.
    """
    for law in kind_spec(identity.partition(".")[0]).laws:
        if law.id == identity:
            return law
    raise SpecError(f"No law {identity!r} in the specification of {identity.partition('.')[0]}.")
