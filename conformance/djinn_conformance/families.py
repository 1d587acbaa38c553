"""Operator families: which overloads there are, which calls of each make sense, and which laws they keep.

Read from ``specs/ops``: ``domains.toml`` says what the words of a call's form mean, ``families/*.toml`` list overloads.

A form is a line of words, one for each argument, ``name=`` before those that are passed by name. A word is a literal
(``None``, ``True``, ``2``, ``0.5``, ``[1,2]``, ``'mean'``), a scalar of ``domains.toml``, or a tensor::

    kind[/dtypes][size][~][:values[(bound)]][+]

``size`` names extents by capital letters that mean the same throughout the call; ``*`` stands for any batch. Without
it the tensor has the size of the call, with ``~`` one that broadcasts with it. ``+`` makes it a list of such tensors,
``?`` before a word lets it be nothing, and words between ``(`` and ``)`` are one list.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar

import attrs
import cattrs
import torch

from djinn.errors import UnknownOperatorError
from djinn.model.schema import facts_of, operator_named
from djinn_conformance.specs import SpecError, folder, law_named

__all__ = ("Domains", "Expected", "Family", "ListWord", "LiteralWord", "OperatorSpec", "ScalarDomain", "ScalarWord",
           "TensorDomain", "TensorWord", "Values", "Word", "domains", "expected_differences", "families",
           "parse_domains", "parse_family", "parse_form", "specs_of")

Loaded = TypeVar("Loaded")
LAYOUTS = ("contiguous", "permuted", "strided", "offset", "channels_last", "expanded", "overlapping")
"""How a tensor may lie in memory."""


@attrs.frozen
class Values:
    """A range of elements: multiples of ``step`` from ``low`` to ``high``, and what else is asked of them."""

    low: float
    high: float
    step: float
    exclude: tuple[float, ...] = ()
    special: bool = False
    """Whether infinities, NaN and negative zero are among them, where the dtype has them."""
    distinct: bool = False
    definite: bool = False
    """Whether the last two dimensions are symmetric positive definite matrices."""
    bounded: bool = False
    """Whether ``high`` is one less than the bound that the word names."""

    def __attrs_post_init__(self) -> None:
        if self.step <= 0 or self.high < self.low:
            raise ValueError(f"no multiples of {self.step} from {self.low} to {self.high}")


@attrs.frozen
class TensorDomain:
    """A kind of tensor argument."""

    dtype: Literal["call", "any", "fixed", "real"]
    """That of the call, any of the operator's, one of ``fixed``, or the real dtype of the call's."""
    fixed: tuple[str, ...] = ()
    """Groups or dtypes."""
    values: str = ""
    """Range of values unless the word names one; empty for the operator's own."""


@attrs.frozen
class ScalarDomain:
    """A kind of argument that is no tensor."""

    kind: Literal["choice", "integer", "dimension", "dimensions", "permutation", "size", "own_size", "own_stride",
                  "own_dtype", "last_size", "dtype", "device", "memory_format"]
    of: tuple[Any, ...] = ()
    """What a choice chooses from; names of dtypes, groups of dtypes or memory formats."""
    low: int = 0
    high: int = 3


@attrs.frozen
class Domains:
    """What the words of forms mean."""

    extents: tuple[int, ...]
    """What a named extent may be."""
    batches: tuple[tuple[int, ...], ...]
    """What ``*`` may stand for."""
    sizes: tuple[tuple[int, ...], ...]
    """Sizes of calls, and of new tensors."""
    destinations: tuple[Literal["fitting", "empty", "smaller", "larger", "other_dtype", "strided", "permuted",
                                "expanded", "input", "shifted"], ...]
    """What is given as ``out=``: see `djinn_conformance.variants`."""
    dtypes: Mapping[str, tuple[str, ...]]
    """Groups of dtypes."""
    values: Mapping[str, Values]
    tensors: Mapping[str, TensorDomain]
    scalars: Mapping[str, ScalarDomain]

    def __attrs_post_init__(self) -> None:
        named = [name for group in self.dtypes.values() for name in group]
        named += [name for domain in self.tensors.values() for name in domain.fixed]
        named += [name for domain in self.scalars.values() if domain.kind == "dtype" for name in domain.of]
        for name in named:
            self.dtypes_named(name)
        for kind, domain in self.tensors.items():
            if domain.values and domain.values not in self.values:
                raise ValueError(f"tensors.{kind}: no values {domain.values!r}")

    def dtypes_named(self, *names: str) -> tuple[torch.dtype, ...]:
        """List the dtypes that groups and names mean.

        Raises:
            ValueError: There is no such group and no such dtype.
        """
        found: list[torch.dtype] = []
        for name in names:
            for member in self.dtypes.get(name, (name,)):
                dtype = getattr(torch, member, None)
                if not isinstance(dtype, torch.dtype):
                    raise ValueError(  # noqa: TRY004  # the name is wrong, not its type
                        f"{member!r} is neither a dtype nor a group of dtypes")
                found.append(dtype)
        return tuple(dict.fromkeys(found))


@attrs.frozen
class TensorWord:
    """A tensor argument."""

    domain: TensorDomain
    values: str
    """Name of the range of its elements; empty for the operator's own."""
    bound: str
    """Extent, number or ``last`` that bounds the elements."""
    size: tuple[str, ...] | None
    """Extents; ``None`` for the size of the call."""
    broadcasts: bool
    many: bool
    optional: bool


@attrs.frozen
class ScalarWord:
    """An argument that is no tensor."""

    domain: ScalarDomain
    optional: bool


@attrs.frozen
class LiteralWord:
    """An argument that is always the same."""

    value: Any


@attrs.frozen
class ListWord:
    """A list of arguments."""

    words: tuple[TensorWord | ScalarWord | LiteralWord, ...]


Word = TensorWord | ScalarWord | LiteralWord | ListWord

_WORD = re.compile(r"(?P<optional>\?)?(?P<base>[a-z][a-z_]*)(/(?P<dtypes>\w+))?"
                   r"(?P<size>\[[A-Z0-9,*]*\])?(?P<broadcasts>~)?(:(?P<values>[a-z_]+)(\((?P<bound>\w+)\))?)?(?P<many>\+)?")
_NAMED = re.compile(r"(?P<name>[a-z_][a-z_0-9]*)=(?P<rest>.+)")


def parse_form(form: str, known: Domains) -> tuple[tuple[Word, ...], tuple[tuple[str, Word], ...]]:
    """Parse a form into its positional and its named words.

    Raises:
        ValueError: A word means nothing; the message names it.
    """
    positional: list[Word] = []
    keywords: list[tuple[str, Word]] = []
    tokens = iter(form.split())
    for token in tokens:
        match = _NAMED.fullmatch(token)
        name, rest = (match["name"], match["rest"]) if match else ("", token)
        word = _list(tokens, form, known) if rest == "(" else _word(rest, known)
        if name:
            keywords.append((name, word))
        elif keywords:
            raise ValueError(f"{token!r} is passed by position after an argument that is passed by name")
        else:
            positional.append(word)
    return tuple(positional), tuple(keywords)


def _list(tokens: Iterator[str], form: str, known: Domains) -> ListWord:
    words: list[TensorWord | ScalarWord | LiteralWord] = []
    for token in tokens:
        if token == ")":  # noqa: S105  # a bracket
            return ListWord(tuple(words))
        words.append(_word(token, known))
    raise ValueError(f"{form!r} lacks a closing bracket")


def _word(token: str, known: Domains) -> TensorWord | ScalarWord | LiteralWord:
    match = _WORD.fullmatch(token)
    if match is None:
        return LiteralWord(_literal(token))
    base, optional = match["base"], match["optional"] is not None
    if base in known.scalars and token in (base, f"?{base}"):
        return ScalarWord(known.scalars[base], optional)
    if base not in known.tensors:
        raise ValueError(f"{token!r} is no word: there is neither a tensor nor a scalar {base!r}")
    domain, values = known.tensors[base], match["values"] or ""
    if match["dtypes"]:
        known.dtypes_named(match["dtypes"])
        domain = attrs.evolve(domain, dtype="fixed", fixed=(match["dtypes"],))
    if values and values not in known.values:
        raise ValueError(f"{token!r}: no values {values!r}")
    values = values or domain.values
    if values and known.values[values].bounded and not match["bound"]:
        raise ValueError(f"{token!r}: values {values!r} need a bound")
    size = None if match["size"] is None else tuple(filter(None, match["size"][1:-1].split(",")))
    return TensorWord(domain, values, match["bound"] or "", size, match["broadcasts"] is not None,
                      match["many"] is not None, optional)


def _literal(token: str) -> Any:
    try:
        return ast.literal_eval(token)
    except (ValueError, SyntaxError):
        raise ValueError(f"{token!r} is neither a word nor a literal") from None


@attrs.frozen
class Granted:
    """A difference in elements that is granted."""

    dtypes: tuple[str, ...]
    relative: float
    absolute: float
    reason: str = attrs.field()

    @reason.validator
    def _check_reason(self, _: object, value: str) -> None:
        if not value.strip():
            raise ValueError("a tolerance needs a reason")


@attrs.frozen
class Entry:
    """One operator as a family lists it; what it leaves out is as in the family."""

    form: str
    dtypes: tuple[str, ...] | None = None
    values: str = ""
    layouts: tuple[str, ...] | None = None
    without: Mapping[str, str] = attrs.field(factory=dict)
    """Laws of the family that say nothing of this operator, and why."""
    destinations: tuple[str, ...] = ()
    """What may be given as ``out=``; the rest makes PyTorch itself write where it should not."""
    undefined: bool = False
    """Whether the elements of its results mean nothing, as those of ``empty``."""
    tolerance: tuple[Granted, ...] = ()


@attrs.frozen
class FamilyFile:
    """A family as it is written down."""

    family: str
    summary: str
    laws: tuple[str, ...]
    dtypes: tuple[str, ...]
    operators: Mapping[str, Entry]
    values: str = "small"
    layouts: tuple[str, ...] = LAYOUTS
    destinations: tuple[str, ...] = ()
    tolerance: tuple[Granted, ...] = ()


@attrs.frozen(eq=False)
class OperatorSpec:
    """One overload: calls that make sense, and laws that it keeps."""

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
    """Operators that have much in common."""

    name: str
    summary: str
    operators: tuple[OperatorSpec, ...]


_converter = cattrs.Converter(forbid_extra_keys=True)
_plain_entry = cattrs.gen.make_dict_structure_fn(Entry, _converter, _cattrs_forbid_extra_keys=True)
_converter.register_structure_hook(
    Entry, lambda value, kind: Entry(value) if isinstance(value, str) else _plain_entry(value, kind))
_converter.register_structure_hook(Any, lambda value, _: value)


def _fault(error: BaseException, _: type[object] | None) -> str:
    return str(error) if isinstance(error, ValueError) else cattrs.v.format_exception(error, None)


def _load(text: str, origin: str, kind: type[Loaded]) -> Loaded:
    try:
        return _converter.structure(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{origin}: {error}") from None
    except cattrs.BaseValidationError as error:
        raise SpecError(f"{origin}: {'; '.join(cattrs.transform_error(error, format_exception=_fault))}") from None


def parse_domains(text: str, origin: str) -> Domains:
    """Parse ``domains.toml``.

    Raises:
        SpecError: Names the origin and every fault.
    """
    return _load(text, origin, Domains)


def parse_family(text: str, origin: str, known: Domains) -> Family:
    """Parse a family.

    Raises:
        SpecError: Names the origin and every fault.
    """
    raw = _load(text, origin, FamilyFile)
    specs: list[OperatorSpec] = []
    faults: list[str] = []
    for name, entry in raw.operators.items():
        try:
            specs.append(_spec(raw, name, entry, known))
        except (ValueError, UnknownOperatorError) as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise SpecError(f"{origin}: {'; '.join(faults)}")
    return Family(raw.family, raw.summary, tuple(specs))


def _spec(raw: FamilyFile, name: str, entry: Entry, known: Domains) -> OperatorSpec:
    for law in raw.laws:
        law_named(law)
    if unknown := set(entry.without) - set(raw.laws):
        raise ValueError(f"is without {', '.join(sorted(unknown))}, which is no law of the family")
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
    if odd := {word for word, _ in keywords} - set(facts.argument_names):
        raise ValueError(f"has no arguments {', '.join(sorted(odd))}")
    tolerance = {dtype: (granted.relative, granted.absolute) for granted in (*raw.tolerance, *entry.tolerance)
                 for dtype in known.dtypes_named(*granted.dtypes)}
    return OperatorSpec(raw.family, operator, positional, keywords, known.dtypes_named(*(entry.dtypes or raw.dtypes)),
                        values, layouts, tuple(law for law in raw.laws if law not in entry.without), destinations,
                        entry.undefined, tolerance)


@lru_cache(maxsize=1)
def domains() -> Domains:
    """Read ``specs/ops/domains.toml``."""
    return parse_domains((folder() / "ops" / "domains.toml").read_text(encoding="utf-8"), "ops/domains.toml")


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Read every family.

    Raises:
        SpecError: One is malformed, named unlike its file, or lists an operator that another lists too.
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
    sometimes: bool = False
    """Whether some calls keep the law, so that a run that sees none that breaks it is no surprise."""


@attrs.frozen
class ExpectedFile:
    """``expected_of_families.toml``."""

    expected: tuple[Expected, ...] = ()


@lru_cache(maxsize=1)
def expected_differences() -> tuple[Expected, ...]:
    """Read which operators break which laws.

    Raises:
        SpecError: The file is malformed, or names an operator that no family has.
    """
    origin = "ops/expected_of_families.toml"
    found = _load((folder() / "ops" / "expected_of_families.toml").read_text(encoding="utf-8"), origin, ExpectedFile)
    for entry in found.expected:
        # Variants are called as their operator is, but for what follows the dot.
        if entry.operator.partition(".")[0] not in {repr(spec).partition(".")[0] for spec in specs_of(entry.law)}:
            raise SpecError(f"{origin}: no family has {entry.operator} under {entry.law}")
    return found.expected


def specs_of(law: str, *names: str) -> tuple[OperatorSpec, ...]:
    """List the operators that keep a law, of some families or of all."""
    return tuple(spec for family in families() if not names or family.name in names for spec in family.operators
                 if law in spec.laws)
