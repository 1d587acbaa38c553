"""Hypothesis strategies: tensors, and random programs that eager PyTorch runs without an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from djinn_conformance.operations import OPERATIONS, Operation
from djinn_conformance.oracle import copied, perform
from djinn_conformance.programs import Call, Recording, Ref, refs_in

__all__ = ("dense_tensors", "filled", "recordings", "tensors")

_SIZES = ((), (1,), (3,), (4,), (2, 3), (3, 2), (3, 3), (1, 3), (0, 3), (2, 3, 3), (2, 2, 3), (1, 2, 4, 4))
_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16,
           torch.complex64, torch.int32, torch.float16)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16)
_CPU = torch.device("cpu")
_LARGEST = 512
"""Elements of the largest result that a program goes on with."""


def filled(size: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Make a CPU tensor of small values that are exact in every dtype, from a seed of its own."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-8, 9, tuple(size), generator=generator)
    if dtype is torch.bool:
        return whole > 0
    if dtype.is_complex:
        return torch.complex(whole / 4, whole.flip(-1) / 2 if whole.dim() else whole / 2).to(dtype)
    if dtype.is_floating_point:
        return (whole / 4).to(dtype)
    return (whole if dtype.is_signed else whole.abs()).to(dtype)


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = _DTYPES) -> torch.Tensor:
    """Draw a small dense CPU tensor, its dimensions in any order in memory."""
    size = draw(st.sampled_from(_SIZES))
    made = filled(size, draw(st.sampled_from(dtypes)), draw(st.integers(0, 999)))
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


@attrs.define
class _Drawer:
    """Draws arguments by the words of `djinn_conformance.operations`, from the values that a program has so far."""

    draw: st.DrawFn
    values: dict[int, Any]

    def tensor(self) -> Ref:
        """Draw a tensor; recent ones more often, so that programs are deep."""
        known = [index for index, value in self.values.items() if isinstance(value, torch.Tensor)]
        recent = known[-3:]
        return Ref(self.draw(st.sampled_from(known + recent + recent)))

    def indices(self) -> list[Ref | None]:
        """Draw what indexes a tensor: integer tensors, masks or nothing."""
        usable = [index for index, value in self.values.items() if isinstance(value, torch.Tensor)
                  and value.dtype in (torch.int64, torch.bool) and value.dim()]
        chosen: list[Ref | None] = [Ref(self.draw(st.sampled_from(usable)))] if usable else []
        return [*([None] * self.draw(st.integers(0, 1))), *chosen]

    def word(self, word: str, first: torch.Tensor | None) -> Any:
        """Draw one argument."""
        draw = self.draw
        rank = first.dim() if first is not None else 2
        small = st.integers(-1, 3)
        simple: dict[str, st.SearchStrategy[Any]] = {
            "n": st.sampled_from([-1, 0, 1, 2, 0.5, -2.0]),
            "f": st.sampled_from([0.0, 0.25, 0.5, 1.0, 1e-3]),
            "i": small,
            "d": st.integers(-rank, max(rank - 1, 0)),
            "D": st.lists(st.integers(0, max(rank - 1, 0)), max_size=rank, unique=True),
            "S": st.one_of(st.sampled_from(_SIZES), st.just(tuple(first.shape) if first is not None else (2,))),
            "iS": st.lists(st.integers(0, 2), min_size=1, max_size=2),
            "p": st.permutations(range(rank)),
            "b": st.booleans(),
            "y": st.sampled_from(_DTYPES),
            "Y": st.sampled_from(_FLOATS),
            "M": st.sampled_from([torch.contiguous_format, torch.preserve_format, torch.channels_last]),
            "V": st.just(torch.device("cpu")),
        }
        if word == "t":
            return self.tensor()
        if word == "?t":
            return self.tensor() if draw(st.booleans()) else None
        if word == "T":
            return [self.tensor() for _ in range(draw(st.integers(1, 3)))]
        if word == "I":
            return self.indices()
        if word in simple:
            drawn = draw(simple[word])
            return list(drawn) if isinstance(drawn, tuple) else drawn
        return _literal(word)

    def call(self, operation: Operation) -> Call:
        """Draw a call of an operation; whether PyTorch accepts it is another matter."""
        first: torch.Tensor | None = None
        args: list[Any] = []
        for word in operation.positional:
            args.append(self.word(word, first))
            if first is None and (refs := refs_in(args[-1])):
                first = self.values[refs[0].index]
        kwargs = {name: self.word(word, first) for name, word in operation.keywords}
        return Call(operation.operator, tuple(args), kwargs, 0)


def _literal(word: str) -> Any:
    constants = {"None": None, "True": True, "False": False, "bbb": [True, False, True]}
    if word in constants:
        return constants[word]
    try:
        return float(word)
    except ValueError:
        return word


def attempt(made: Call, values: dict[int, Any]) -> Call | None:
    """Carry a drawn call out and take its results over, unless PyTorch refuses it or they are too large."""
    try:
        returned = perform(made, values, _CPU)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, ArithmeticError):
        return None
    if any(isinstance(result, torch.Tensor) and result.numel() > _LARGEST for result in returned):
        return None
    start = sum(index >= 0 for index in values)
    values.update(enumerate(returned, start))
    return attrs.evolve(made, results=len(returned))


@st.composite
def recordings(
    draw: st.DrawFn,
    operations: Sequence[Operation] | None = None,
    *,
    favoured: Sequence[Operation] = (),
    max_calls: int = 12,
    dtypes: Sequence[torch.dtype] = _DTYPES,
) -> Recording:
    """Draw calls that eager PyTorch carries out one after the other.

    Args:
        draw: Hypothesis.
        operations: What to draw from; all deterministic operations if omitted.
        favoured: Operations that make up about half of the calls.
        max_calls: Most calls to try.
        dtypes: Dtypes of the inputs.
    """
    inputs = tuple(draw(st.lists(tensors(dtypes), min_size=1, max_size=4)))
    groups = [operations] if operations is not None else list(OPERATIONS.values())
    groups += [favoured] * len(groups) if favoured else []
    values: dict[int, Any] = {-1 - index: copied(tensor, _CPU) for index, tensor in enumerate(inputs)}
    drawer = _Drawer(draw, values)
    calls: list[Call] = []
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(draw(st.integers(1, max_calls))):
            group = draw(st.sampled_from(groups))
            made = attempt(drawer.call(draw(st.sampled_from(group))), values)
            if made is not None:
                calls.append(made)
    return Recording(inputs, tuple(calls))
