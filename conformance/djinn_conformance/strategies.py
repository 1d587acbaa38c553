"""Hypothesis strategies: tensors, and random programs that run without an error in eager PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import attrs
import torch
from hypothesis import strategies as st

from djinn_conformance.operations import Operation, grouped
from djinn_conformance.oracle import copied, perform, seeded
from djinn_conformance.programs import RecordedCall, Recording, Ref, refs_in

__all__ = ("among", "dense_tensors", "filled", "position", "recordings", "tensors")

T = TypeVar("T")
_SIZES = ((3, 3), (3,), (3, 3), (), (2, 3, 3), (1,), (2, 3), (3, 2), (1, 3), (0, 3), (3, 3), (2, 2, 2, 3))
_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float32, torch.int64, torch.int64, torch.bool,
           torch.float64, torch.bfloat16, torch.complex64, torch.int32)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16)
_CPU = torch.device("cpu")
_TRIES = 2
"""How often to draw other arguments for an operation that PyTorch refuses."""
_LARGEST = 512
"""Most elements of a result that a program continues to use."""


def filled(size: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Create a CPU tensor of small values that are exact in every dtype, with a separate seed."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-8, 9, tuple(size), generator=generator)
    if dtype is torch.bool:
        return whole > 0
    if dtype.is_complex:
        return torch.complex(whole / 4, whole.flip(-1) / 2 if whole.dim() else whole / 2).to(dtype)
    if dtype.is_floating_point:
        return (whole / 4).to(dtype)
    return (whole if dtype.is_signed else whole.abs()).to(dtype)


@lru_cache(maxsize=1024)
def _among(elements: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(elements)


def among(*elements: T) -> st.SearchStrategy[T]:
    """Draw one of some sizes, dtypes, or names. Strategies are cached: creating one takes longer than drawing."""
    found: st.SearchStrategy[T] = _among(elements)
    return found


def position(count: int) -> st.SearchStrategy[int]:
    """Draw an index into ``count`` elements, as `hypothesis.strategies.sampled_from` would to choose one of them."""
    return among(*range(count))


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = _DTYPES) -> torch.Tensor:
    """Draw a small dense CPU tensor, with its dimensions in any memory order."""
    size = draw(among(*_SIZES))
    made = filled(size, draw(among(*dtypes)), draw(st.integers(0, 999)))
    if len(size) < 2 or not draw(st.booleans()):
        return made
    order = draw(st.permutations(range(len(size))))
    return made.permute(order).contiguous().permute([order.index(dim) for dim in range(len(size))])


@st.composite
def dense_tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """Draw a dense CPU tensor of arbitrary bits, of any of the dtypes, with up to five dimensions in any order."""
    size = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(st.sampled_from(dtypes))
    count = torch.Size(size).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(size), generator=generator).bool()
    order = draw(st.permutations(range(len(size))))
    flat = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype)
    return flat.view([size[dim] for dim in order]).permute([order.index(dim) for dim in range(len(size))])


_WORDS: Mapping[str, Callable[[int], st.SearchStrategy[Any]]] = {
    "n": lambda rank: st.sampled_from([-1, 0, 1, 2, 0.5, -2.0]),
    "f": lambda rank: st.sampled_from([0.5, 0.25, 0.0, 1.0, 1e-3]),
    "i": lambda rank: st.integers(-1, 3),
    "k": lambda rank: st.integers(0, 3),
    "d": lambda rank: st.integers(-rank, max(rank - 1, 0)),
    "D": lambda rank: st.lists(st.integers(0, max(rank - 1, 0)), max_size=rank, unique=True),
    "S": lambda rank: st.sampled_from(_SIZES).map(list),
    "p": lambda rank: st.permutations(range(rank)),
    "b": lambda rank: st.booleans(),
    "y": lambda rank: st.sampled_from(_DTYPES),
    "Y": lambda rank: st.sampled_from(_FLOATS),
    "M": lambda rank: st.sampled_from([torch.contiguous_format, torch.preserve_format, torch.channels_last]),
    "V": lambda rank: st.just(_CPU),
}
"""The value drawn for a word of `djinn_conformance.operations`, given the first tensor's number of dimensions."""


@lru_cache(maxsize=256)
def _strategy_of(word: str, rank: int) -> st.SearchStrategy[Any]:
    return _WORDS[word](rank)


_FITS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "t": lambda value, first: True,
    "s": lambda value, first: value.shape == first.shape and value.dtype == first.dtype,
    "x": lambda value, first: value.dtype.is_floating_point,
    "c": lambda value, first: value.dtype.is_complex,
    "l": lambda value, first: value.dtype is torch.int64,
    "m": lambda value, first: value.dtype is torch.bool,
    "w": lambda value, first: (
        value.dim() == 2 and value.dtype == first.dtype and value.shape[-1] == first.shape[-1:].numel()),
    "v": lambda value, first: value.shape == first.shape[-1:] and value.dtype == first.dtype,
}
"""Which tensors fit a word, given the first one of the call."""


@attrs.define
class _Drawer:
    """Draws arguments by the words of `djinn_conformance.operations`, from the program's values so far."""

    draw: st.DrawFn
    values: dict[int, Any]

    def tensor(self, word: str, first: torch.Tensor | None) -> Ref:
        """Draw a tensor that fits, if there is one; prefer recent ones, so that programs are deep."""
        known = [index for index, value in self.values.items() if isinstance(value, torch.Tensor)]

        def fits(value: torch.Tensor) -> bool:
            return _FITS[word](value, value if first is None else first)

        usable = [index for index in known if fits(self.values[index])] or known
        usable += usable[-3:]
        return Ref(usable[self.draw(position(len(usable)))])

    def indices(self) -> list[Ref | None]:
        """Draw the indices of a tensor: an integer tensor or mask, possibly after ``None``."""
        usable = [index for index, value in self.values.items() if isinstance(value, torch.Tensor)
                  and value.dtype in (torch.int64, torch.bool) and value.dim()]
        chosen: list[Ref | None] = [Ref(usable[self.draw(position(len(usable)))])] if usable else []
        return [*([None] * self.draw(st.integers(0, 1))), *chosen]

    def word(self, word: str, first: torch.Tensor | None) -> Any:
        """Draw one argument."""
        if word.startswith("?"):
            return self.word(word[1:], first) if self.draw(st.booleans()) else None
        if word in _FITS:
            return self.tensor(word, first)
        if word == "T":
            head = self.tensor("t", None)
            return [head, *(self.tensor("s", self.values[head.index]) for _ in range(self.draw(st.integers(0, 2))))]
        if word == "I":
            return self.indices()
        if word in ("Z", "L"):
            size = list(first.shape) if first is not None else []
            return size[-1:] if word == "L" else size
        if word in _WORDS:
            return self.draw(_strategy_of(word, first.dim() if first is not None else 2))
        return _literal(word)

    def call(self, operation: Operation) -> RecordedCall:
        """Draw a call of an operation; PyTorch may refuse it."""
        first: torch.Tensor | None = None
        args: list[Any] = []
        for word in operation.positional:
            args.append(self.word(word, first))
            if first is None and (refs := refs_in(args[-1])):
                first = self.values[refs[0].index]
        kwargs = {name: self.word(word, first) for name, word in operation.keywords}
        return RecordedCall(operation.operator, tuple(args), kwargs, 0)


def _literal(word: str) -> Any:
    constants = {"None": None, "True": True, "False": False, "bbb": [True, False, True]}
    if word in constants:
        return constants[word]
    if word.startswith("["):
        return [int(item) for item in word[1:-1].split(",")]
    if re.fullmatch(r"-?[0-9.]+", word):
        return float(word) if "." in word else int(word)
    return word


def attempt(made: RecordedCall, values: dict[int, Any]) -> RecordedCall | None:
    """Execute a drawn call and add its results, unless PyTorch refuses it or they are too large."""
    try:
        returned = perform(made, values, _CPU)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, ArithmeticError):
        return None
    if any(isinstance(result, torch.Tensor) and result.numel() > _LARGEST for result in returned):
        return None
    start = sum(index >= 0 for index in values)
    values.update(enumerate(returned, start))
    return attrs.evolve(made, results=len(returned))


def recordings(
    operations: Sequence[Operation] | None = None,
    *,
    favoured: Sequence[Operation] = (),
    max_calls: int = 12,
    dtypes: Sequence[torch.dtype] = _DTYPES,
) -> st.SearchStrategy[Recording]:
    """Draw calls that eager PyTorch executes one after the other.

    Args:
        operations: The operations to draw from; all deterministic operations if omitted.
        favoured: Operations that make up about half of the calls.
        max_calls: Most calls to try.
        dtypes: Dtypes of the inputs.
    """
    chosen = st.sampled_from(grouped() if operations is None else operations)
    chosen = chosen | st.sampled_from(favoured) if favoured else chosen
    return _recordings(st.lists(tensors(dtypes), min_size=2, max_size=5),
                       st.lists(chosen, min_size=max_calls // 2, max_size=max_calls))


@st.composite
def _recordings(
    draw: st.DrawFn, tensors: st.SearchStrategy[list[torch.Tensor]], operations: st.SearchStrategy[list[Operation]]
) -> Recording:
    inputs = tuple(draw(tensors))
    values: dict[int, Any] = {-1 - index: copied(tensor, _CPU) for index, tensor in enumerate(inputs)}
    drawer = _Drawer(draw, values)
    calls: list[RecordedCall] = []
    with torch.no_grad(), seeded(_CPU, 0):
        for operation in draw(operations):
            made = next(filter(None, (attempt(drawer.call(operation), values) for _ in range(_TRIES))), None)
            if made is not None:
                calls.append(made)
    return Recording(inputs, tuple(calls))
