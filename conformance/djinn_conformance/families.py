"""Operator families: the overloads, valid calls of each, and the laws they keep.

Read from ``specs/ops``: ``domains.toml`` defines the words of a call's form (see `djinn_conformance.forms`),
``families/*.toml`` list overloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import attrs
import cattrs
import torch

from djinn.errors import UnknownOperatorError
from djinn.ir.schema import facts_of
from djinn_conformance.forms import Domains, Word, parse_form
from djinn_conformance.specs import SpecError, folder, is_running, law_named, parse
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("Expected", "Family", "OperatorSpec", "domains", "expected_differences", "families", "parse_domains",
           "parse_expected", "parse_family", "specs_of")

LAYOUTS = ("contiguous", "permuted", "strided", "offset", "channels_last", "expanded", "overlapping")
"""Memory layouts of tensors."""


@attrs.frozen
class Tolerance:
    """A permitted difference in elements."""

    dtypes: tuple[str, ...]
    relative: float
    absolute: float
    reason: str = attrs.field()

    @reason.validator
    def _check_reason(self, _: object, value: str) -> None:
        if not value.strip():
            raise ValueError("a tolerance needs a reason")


@attrs.frozen
class FamilyEntry:
    """An operator as listed in a family; omitted fields are inherited from the family."""

    form: str
    dtypes: tuple[str, ...] | None = None
    values: str = ""
    layouts: tuple[str, ...] | None = None
    without: Mapping[str, str] = attrs.field(factory=dict)
    """Laws of the family that do not apply to this operator, and why."""
    destinations: tuple[str, ...] = ()
    """Valid tensors for ``out=``; with others, PyTorch itself writes where it should not."""
    undefined: bool = False
    """Whether the elements of its results are undefined, as those of ``empty``."""
    tolerance: tuple[Tolerance, ...] = ()
    torch: str = ""
    """Releases of PyTorch that have it, as a version specifier; empty for all."""


@attrs.frozen
class FamilyFile:
    """A family as written in its file."""

    family: str
    summary: str
    laws: tuple[str, ...]
    dtypes: tuple[str, ...]
    operators: Mapping[str, FamilyEntry]
    values: str = "small"
    layouts: tuple[str, ...] = LAYOUTS
    destinations: tuple[str, ...] = ()
    tolerance: tuple[Tolerance, ...] = ()


@attrs.frozen(eq=False)
class OperatorSpec:
    """One overload: its valid calls, and the laws that it keeps."""

    family: str
    operator: torch._ops.OpOverload
    positional: tuple[Word, ...]
    keywords: tuple[tuple[str, Word], ...]
    dtypes: tuple[torch.dtype, ...]
    values: str
    layouts: tuple[str, ...]
    laws: tuple[str, ...]
    destinations: tuple[str, ...]
    undefined: bool
    tolerance: Mapping[torch.dtype, tuple[float, float]]

    def __repr__(self) -> str:
        return str(self.operator.name())

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return facts_of(self.operator).is_random


@attrs.frozen
class Family:
    """Similar operators."""

    name: str
    summary: str
    operators: tuple[OperatorSpec, ...]


_converter = cattrs.Converter(forbid_extra_keys=True)
_plain_entry = cattrs.gen.make_dict_structure_fn(FamilyEntry, _converter, _cattrs_forbid_extra_keys=True)
_converter.register_structure_hook(
    FamilyEntry, lambda value, kind: FamilyEntry(value) if isinstance(value, str) else _plain_entry(value, kind))
_converter.register_structure_hook(Any, lambda value, _: value)


def parse_domains(text: str, origin: str) -> Domains:
    """Parse ``domains.toml``.

    Raises:
        SpecError: The error names the origin and every fault.
    """
    return parse(text, origin, Domains, _converter)


def parse_family(text: str, origin: str, known: Domains) -> Family:
    """Parse a family.

    Raises:
        SpecError: The error names the origin and every fault.
    """
    raw = parse(text, origin, FamilyFile, _converter)
    specs: list[OperatorSpec] = []
    faults: list[str] = []
    for name, entry in raw.operators.items():
        if not is_running(entry.torch):
            continue
        try:
            specs.append(_spec(raw, name, entry, known))
        except (ValueError, UnknownOperatorError) as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise SpecError(f"{origin}: {'; '.join(faults)}")
    return Family(raw.family, raw.summary, tuple(specs))


def _spec(raw: FamilyFile, name: str, entry: FamilyEntry, known: Domains) -> OperatorSpec:
    for law in raw.laws:
        law_named(law)
    if unknown := set(entry.without) - set(raw.laws):
        raise ValueError(f"is without {', '.join(sorted(unknown))}, which is no law of the family")
    if groundless := [law for law, reason in entry.without.items() if not reason.strip()]:
        raise ValueError(f"is without {', '.join(groundless)}; that needs a reason")
    layouts = entry.layouts or raw.layouts
    if odd := set(layouts) - set(LAYOUTS):
        raise ValueError(f"no layouts {', '.join(sorted(odd))}")
    values = entry.values or raw.values
    if values not in known.values:
        raise ValueError(f"no values {values!r}")
    destinations = entry.destinations or raw.destinations or known.destinations
    if odd := set(destinations) - set(known.destinations):
        raise ValueError(f"no destinations {', '.join(sorted(odd))}")
    operator = operator_named(f"aten::{name}")
    positional, keywords = parse_form(entry.form, known)
    facts = facts_of(operator)
    dtypes = known.dtypes_named(*(entry.dtypes or raw.dtypes))
    named = {word for word, _ in keywords}
    if odd := named - set(facts.argument_names):
        raise ValueError(f"has no arguments {', '.join(sorted(odd))}")
    lacking = [argument.name for argument in operator._schema.arguments[len(positional):]
               if not argument.has_default_value() and argument.name not in named]
    if lacking:
        raise ValueError(f"lacks {', '.join(lacking)}, so that every call would raise")
    tolerance = {dtype: (granted.relative, granted.absolute) for granted in (*raw.tolerance, *entry.tolerance)
                 for dtype in known.dtypes_named(*granted.dtypes)}
    return OperatorSpec(raw.family, operator, positional, keywords, dtypes, values, layouts,
                        tuple(law for law in raw.laws if law not in entry.without), destinations, entry.undefined,
                        tolerance)


@lru_cache(maxsize=1)
def domains() -> Domains:
    """Read ``specs/ops/domains.toml``."""
    return parse_domains((folder() / "ops" / "domains.toml").read_text(encoding="utf-8"), "ops/domains.toml")


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Read every family.

    Raises:
        SpecError: A family is malformed, has a name other than its file's, or lists an operator that another family
            also lists.
    """
    listed = [entry for entry in (folder() / "ops" / "families").iterdir() if entry.name.endswith(".toml")]
    made, seen = [], dict[str, str]()
    for entry in sorted(listed, key=lambda file: file.name):
        family = parse_family(entry.read_text(encoding="utf-8"), entry.name, domains())
        if entry.name != f"{family.name}.toml":
            raise SpecError(f"{entry.name} describes the family {family.name!r}; name it {family.name}.toml")
        for spec in family.operators:
            if (other := seen.setdefault(repr(spec), family.name)) != family.name:
                raise SpecError(f"{spec} is in the families {other} and {family.name}")
        made.append(family)
    return tuple(made)


@attrs.frozen
class Expected:
    """A law that an operator is known to break, and why."""

    law: str
    operator: str
    status: Literal["raises", "differs"]
    reason: str = attrs.field(validator=attrs.validators.min_len(20))
    link: str = attrs.field(validator=attrs.validators.min_len(5))
    torch: str = ""
    """Releases of PyTorch, as a version specifier; empty for all."""


@attrs.frozen
class ExpectedFile:
    """``expected_of_families.toml``."""

    expected: tuple[Expected, ...] = ()


def parse_expected(text: str, origin: str) -> tuple[Expected, ...]:
    """Parse the file of operators that are known to break laws.

    Raises:
        SpecError: The error names the origin and every fault, or an operator that no family has.
    """
    found = parse(text, origin, ExpectedFile, _converter)
    for entry in found.expected:
        # Variants have the name of their operator, except for the part after the dot.
        if entry.operator.partition(".")[0] not in {repr(spec).partition(".")[0] for spec in specs_of(entry.law)}:
            raise SpecError(f"{origin}: no family has {entry.operator} under {entry.law}")
    return found.expected


@lru_cache(maxsize=1)
def expected_differences() -> tuple[Expected, ...]:
    """Read ``expected_of_families.toml``."""
    path = folder() / "ops" / "expected_of_families.toml"
    found = parse_expected(path.read_text(encoding="utf-8"), "ops/expected_of_families.toml")
    return tuple(entry for entry in found if is_running(entry.torch))


def specs_of(law: str, *names: str) -> tuple[OperatorSpec, ...]:
    """List the operators that keep a law, of some families or of all."""
    return tuple(spec for family in families() if not names or family.name in names for spec in family.operators
                 if law in spec.laws)
