"""Forms of calls: the words with which operator families describe arguments, and their meaning.

A form is a line of words, one for each argument, ``name=`` before those that are passed by name. A word is a literal
(``None``, ``True``, ``2``, ``0.5``, ``[1,2]``, ``'mean'``), a scalar of ``domains.toml``, or a tensor::

    kind[/dtypes][size][~][:values[(bound)]][+]

``size`` names extents by capital letters that have the same value throughout the call; ``*`` represents any batch.
Without it the tensor has the size of the call, with ``~`` one that broadcasts with it. ``+`` makes it a list of such
tensors, ``?`` before a word makes the argument optional, and words between ``(`` and ``)`` are one list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import torch

__all__ = ("Domains", "ListWord", "LiteralWord", "ScalarDomain", "ScalarWord", "TensorDomain", "TensorWord", "Values",
           "Word", "parse_form")


@attrs.frozen
class Values:
    """A range of elements: multiples of ``step`` from ``low`` to ``high``, with further conditions."""

    low: float
    high: float
    step: float
    exclude: tuple[float, ...] = ()
    special: bool = False
    """Whether it includes infinities, NaN and negative zero, if the dtype has them."""
    distinct: bool = False
    definite: bool = False
    """Whether the last two dimensions are symmetric positive definite matrices."""
    bounded: bool = False
    """Whether ``high`` is one less than the bound in the word."""

    def __attrs_post_init__(self) -> None:
        if self.step <= 0 or self.high < self.low:
            raise ValueError(f"no multiples of {self.step} from {self.low} to {self.high}")


@attrs.frozen
class TensorDomain:
    """A kind of tensor argument."""

    dtype: Literal["call", "any", "fixed", "real"]
    """The call's dtype, any of the operator's, one of ``fixed``, or the real counterpart of the call's."""
    fixed: tuple[str, ...] = ()
    """Groups or dtypes."""
    values: str = ""
    """Range of values unless the word specifies one; empty for the operator's default."""


@attrs.frozen
class ScalarDomain:
    """A kind of non-tensor argument."""

    kind: Literal["choice", "integer", "dimension", "dimensions", "permutation", "size", "own_size", "own_stride",
                  "own_dtype", "last_size", "dtype", "device", "memory_format"]
    of: tuple[Any, ...] = ()
    """The options of a choice; names of dtypes, groups of dtypes or memory formats."""
    low: int = 0
    high: int = 3


@attrs.frozen
class Domains:
    """The meaning of the words in forms."""

    extents: tuple[int, ...]
    """Possible values of a named extent."""
    batches: tuple[tuple[int, ...], ...]
    """Batches that ``*`` may represent."""
    sizes: tuple[tuple[int, ...], ...]
    """Sizes of calls, and of new tensors."""
    destinations: tuple[Literal["fitting", "empty", "smaller", "larger", "other_dtype", "strided", "permuted",
                                "expanded", "input", "shifted"], ...]
    """Tensors given as ``out=``: see `djinn_conformance.variants`."""
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
        """List the dtypes of groups and names.

        Raises:
            ValueError: There is no such group or dtype.
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
    """Name of the range of its elements; empty for the operator's default."""
    bound: str
    """Extent, number or ``last`` that bounds the elements."""
    size: tuple[str, ...] | None
    """Extents; ``None`` for the size of the call."""
    broadcasts: bool
    many: bool
    optional: bool


@attrs.frozen
class ScalarWord:
    """A non-tensor argument."""

    domain: ScalarDomain
    optional: bool


@attrs.frozen
class LiteralWord:
    """A constant argument."""

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
        ValueError: A word is unknown; the message names it.
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
