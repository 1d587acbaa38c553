"""Lines of random programs: forms with gaps, read from ``specs/machine.toml``, and how to fill the gaps."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from string import Formatter
from typing import Any, TypeVar

import attrs
import cattrs
import torch
from hypothesis import strategies as st

from djinn.wire.tensors import is_dense
from djinn_conformance.refusals import overlaps_itself
from djinn_conformance.specs import SpecError, folder

__all__ = ("Drawer", "Form", "Table", "table")

T = TypeVar("T")
_FILE = "machine.toml"
_SIZES = ((3,), (2, 3), (3, 3), (2, 3, 2), (1, 3), (4,), (2, 2), (1,), (), (0,), (2, 1, 3), (0, 2))
_DTYPES = ("torch.float32", "torch.float32", "torch.float64", "torch.int64", "torch.int32", "torch.bool", "torch.uint8",
           "torch.bfloat16", "torch.complex64")
_FLOATS = ("torch.float32", "torch.float32", "torch.float64", "torch.bfloat16")
_NUMBERS = ("2", "1", "-1", "0", "0.5", "3")
_INDICES = ("0", "-1", "1", "1:", ":-1", "::2", "...", ":", "None", "..., 0", "..., 1:", "0, 1:", ":, 1", "1:, ::2",
            ":, None", "..., :1", "2:1", "True", "1:, 0")
_WRITING = ("write", "out", "mixed")
"""Groups in which a source that partly overlaps the target is copied first: eager compares addresses and refuses."""
_IN_PLACE = re.compile(r"_\(|\] [-+*/]?= |out=|inplace=")
"""Matches lines that write to tensors."""


@attrs.frozen
class Form:
    """A line with gaps.

    Attributes:
        group: The kind of line.
        text: The line.
        pieces: Text and the gap after it, in order; the last gap may be absent.
    """

    group: str
    text: str
    pieces: tuple[tuple[str, str | None], ...]

    @property
    def words(self) -> list[str]:
        """Words of the gaps, in order."""
        return [word for _, word in self.pieces if word is not None]

    @property
    def writes(self) -> bool:
        """Whether it writes to tensors."""
        return _IN_PLACE.search(self.text) is not None


@attrs.frozen
class _Group:
    forms: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))


@attrs.frozen
class _File:
    programs: Mapping[str, int]
    floors: Mapping[str, float]
    groups: Mapping[str, _Group]


@attrs.frozen
class Table:
    """The content of the specification.

    Attributes:
        programs: How many programs each profile runs.
        floors: How often, per program, each event must have happened for the run to be meaningful.
        groups: The forms by group.
    """

    programs: Mapping[str, int]
    floors: Mapping[str, float]
    groups: Mapping[str, tuple[Form, ...]]


@cache
def table() -> Table:
    """Read the forms.

    Raises:
        SpecError: The file is malformed, or a gap has an unknown word.
    """
    text = (folder() / _FILE).read_text(encoding="utf-8")
    try:
        read = cattrs.Converter(forbid_extra_keys=True).structure(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, cattrs.BaseValidationError) as error:
        faults = [str(error)] if isinstance(error, ValueError) else cattrs.transform_error(error)
        raise SpecError(f"{_FILE}: {'; '.join(faults)}") from None
    return Table(read.programs, read.floors, {name: tuple(_form(name, line) for line in group.forms)
                                 for name, group in read.groups.items()})


def _form(group: str, text: str) -> Form:
    form = Form(group, text, tuple((literal, word) for literal, word, _, _ in Formatter().parse(text)))
    unknown = {*form.words} - {*_KINDS, *_GAPS, "y", "z"}
    if unknown:
        raise SpecError(f"{_FILE}: {text!r} in {group} has gaps of unknown kinds: {', '.join(sorted(unknown))}")
    return form


def _requires_grad(value: torch.Tensor, *, leaf: bool = False) -> bool:
    try:
        return value.requires_grad and (value.is_leaf or not leaf)
    except RuntimeError:
        # A view that autograd can no longer track: PyTorch raises on any access.
        return False


_KINDS: Mapping[str, Callable[[str, torch.Tensor], bool]] = {
    "x": lambda name, value: name.startswith("t"),
    "f": lambda name, value: name.startswith("t") and value.dtype.is_floating_point,
    "c": lambda name, value: name.startswith("t") and value.dtype.is_complex,
    "b": lambda name, value: name.startswith("t") and value.dtype is torch.bool,
    "l": lambda name, value: name.startswith("t") and value.dtype is torch.int64,
    "g": lambda name, value: name.startswith("t") and _requires_grad(value),
    "h": lambda name, value: name.startswith("t") and _requires_grad(value, leaf=True),
    "v": lambda name, value: name.startswith("c"),
    "w": lambda name, value: name.startswith("c"),
}
"""Which tensors fit into a gap."""


@lru_cache(maxsize=256)
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


@attrs.define
class Drawer:
    """Fills the gaps of forms.

    Attributes:
        draw: Draws from a strategy.
        values: The eager tensors that a line may use, by name.
        keeps_apart: Whether lines that write avoid tensors that overlap themselves, and use a copy if there is no other
            tensor.
    """

    draw: Callable[[st.SearchStrategy[Any]], Any]
    values: Mapping[str, torch.Tensor]
    keeps_apart: bool = False
    _chosen: dict[str, str] = attrs.field(init=False, factory=dict)
    _first: torch.Tensor | None = attrs.field(init=False, default=None)
    _dim: int = attrs.field(init=False, default=0)
    _again: dict[str, str] = attrs.field(init=False, factory=dict)

    @property
    def used(self) -> list[torch.Tensor]:
        """The eager tensors used by the last filled form."""
        return [self.values[name.removesuffix(".clone()")] for name in self._chosen.values()]

    def pick(self, items: Sequence[T]) -> T:
        """Draw one of several things."""
        return items[self.draw(_below(len(items)))] if len(items) > 1 else items[0]

    def form(self, forms: Sequence[Form]) -> Form | None:
        """Draw a form that the existing tensors can fill."""
        lacking = {word for word, fits in _KINDS.items() if not any(fits(n, v) for n, v in self.values.items())}
        lacking |= {"y", "z"} if "x" in lacking else set()
        usable = [form for form in forms if lacking.isdisjoint(form.words)]
        return self.pick(usable) if usable else None

    def fill(self, form: Form) -> str:
        """Fill a form's gaps."""
        self._chosen, self._again, self._first, self._dim = {}, {}, None, 0
        for word in form.words:
            if self._is_tensor(word) and word not in self._chosen:
                self._chosen[word] = self._tensor(word, form)
        parts = []
        for literal, gap in form.pieces:
            parts.append(literal)
            if gap is not None:
                parts.append(self._chosen[gap] if self._is_tensor(gap) else self._fill(gap))
        return "".join(parts)

    @staticmethod
    def _is_tensor(word: str) -> bool:
        return word in _KINDS or word in ("y", "z")

    def _fill(self, word: str) -> str:
        if word.endswith("0"):
            return self._again[word[:-1]]
        text = _GAPS[word](self)
        self._again[word] = text
        return text

    def _tensor(self, word: str, form: Form) -> str:
        fits, group = _KINDS["x"] if word in ("y", "z") else _KINDS[word], form.group
        names = [name for name, value in self.values.items() if fits(name, value)]
        if self.keeps_apart and form.writes:
            apart = [name for name in names if not overlaps_itself(self.values[name])]
            if not apart:
                name = self.pick(names)
                self._first = self.values[name] if self._first is None else self._first
                return f"{name}.clone()"
            names = apart
        first = self._first
        if first is not None and word == "y":
            alike = [n for n in names if self.values[n].dtype is first.dtype and _broadcasts(self.values[n], first)]
            names = (alike or names) if self.draw(_below(8)) else names
        name = self.pick(names)
        if first is None:
            self._first = self.values[name]
            if group == "metadata" and self._is_tracked(name):
                return f"{name}.clone()"
        elif word == "z":
            target = self.values[name]
            used = any(_share(target, value) for value in self.used)
            return f"{name}.clone()" if used or self._is_tracked(name) else name
        elif group in _WRITING and _overlaps_in_part(self.values[name], first):
            return f"{name}.clone()"
        return name

    def _is_tracked(self, name: str) -> bool:
        """Whether a tensor is, or has, a view that autograd tracks."""
        target = self.values[name]
        return any(value._is_view() and _requires_grad(value) and (value is target or _share(target, value))
                   for value in self.values.values())

    @property
    def rank(self) -> int:
        """Number of dimensions of the line's first tensor."""
        return self._first.dim() if self._first is not None else 2

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the line's first tensor."""
        return tuple(self._first.shape) if self._first is not None else (2, 3)

    @property
    def extent(self) -> int:
        """Size of the last drawn dimension."""
        return self.size[self._dim] if -self.rank <= self._dim < self.rank else 1

    def dim(self) -> str:
        """Draw a dimension, rarely one that does not exist."""
        self._dim = self.pick([*range(self.rank), *range(self.rank), *range(-self.rank, 0), self.rank])
        return str(self._dim)

    def rows(self) -> str:
        """Draw valid indices."""
        extent = self.extent
        chosen = [self.draw(_below(extent)) for _ in range(self.pick((1, 2, 2)) if self.rank else 1)] if extent else []
        return f"torch.tensor({chosen}, dtype=torch.int64, device=device)"

    def where(self) -> str:
        """Draw valid indices, of the first tensor's size."""
        count = torch.Size(self.size).numel()
        return f"torch.arange({count}, device=device).view({self.size}).remainder({max(self.extent, 1)})"

    def fitting(self) -> str:
        """Draw a size as which the first tensor can be viewed."""
        size, count = self.size, torch.Size(self.size).numel()
        options = [(-1,), (1, *size), (*size, 1), size[::-1], (count,), tuple(n for n in size if n != 1), (2, -1)]
        return str(self.pick(options))

    def smaller(self) -> str:
        """Draw a size that fits into the first tensor's memory, with at most as many elements."""
        assert self._first is not None
        room = self._first.untyped_storage().nbytes() // self._first.element_size() - self._first.storage_offset()
        count = min(self._first.numel(), room)
        return str(self.pick([size for size in (*_SIZES, self.size) if torch.Size(size).numel() <= count]))

    def strided(self) -> str:
        """Draw arguments of ``as_strided`` that stay within the storage."""
        assert self._first is not None
        length = self._first.untyped_storage().nbytes() // self._first.element_size()
        size = self.pick(((2,), (3,), (2, 2), (1,), (2, 3), (0,)))
        stride = tuple(self.pick((1, 2, 0, 3, 1)) for _ in size)
        reach = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) if 0 not in size else 0
        return f"{size}, {stride}, {self.draw(_below(max(length - reach, 1)))}"

    def mask(self) -> str:
        """Draw a mask of the first tensor's size."""
        name = next(iter(self._chosen.values()))
        return f"({name} {self.pick(('> 0', '== 0', '!= 1'))})" if not self._is_complex else f"({name} == 0)"

    @property
    def _is_complex(self) -> bool:
        return self._first is not None and self._first.dtype.is_complex

    def one(self) -> str:
        """Return a one of the first tensor's dtype."""
        return f"torch.ones((), dtype={self._first.dtype if self._first is not None else 'None'}, device=device)"


_GAPS: Mapping[str, Callable[[Drawer], str]] = {
    "d": Drawer.dim,
    "d0": str,
    "rows": Drawer.rows,
    "rows0": str,
    "where": Drawer.where,
    "fits": Drawer.fitting,
    "smaller": Drawer.smaller,
    "strided": Drawer.strided,
    "mask": Drawer.mask,
    "n1": Drawer.one,
    "i": lambda drawer: drawer.pick(("0", "-1", "1", "2")),
    "j": lambda drawer: drawer.pick(("0", "1", "-1")),
    "k": lambda drawer: drawer.pick(("1", "2", "0", "3")),
    "n": lambda drawer: drawer.pick(_NUMBERS),
    "p": lambda drawer: str(tuple(drawer.draw(st.permutations(range(drawer.rank))))),
    "size": lambda drawer: str(drawer.pick((*_SIZES, drawer.size))),
    "dtype": lambda drawer: drawer.pick(_DTYPES),
    "float": lambda drawer: drawer.pick(_FLOATS),
    "flag": lambda drawer: drawer.pick(("True", "False")),
    "seed": lambda drawer: str(drawer.draw(_below(100))),
    "numbers": lambda drawer: drawer.pick(("[1, -2, 3]", "[[1, 2], [3, 0]]", "1.5", "[]")),
    "index": lambda drawer: drawer.pick(_INDICES),
    "index0": str,
}
"""How to fill a gap. Words that end in 0 repeat the previous value."""


def _broadcasts(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return one.dim() <= other.dim() and all(mine in (1, theirs) for mine, theirs in pairs)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _overlaps_in_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether eager refuses to read one while writing the other, because it detects a partial overlap."""
    if one is other or not _share(one, other):
        return False
    if not all(is_dense(tuple(value.shape), value.stride()) for value in (one, other)):
        return False
    mine, theirs = (range(v.data_ptr(), v.data_ptr() + v.numel() * v.element_size()) for v in (one, other))
    is_the_same = mine == theirs and one.stride() == other.stride()
    return not is_the_same and max(mine.start, theirs.start) < min(mine.stop, theirs.stop)
