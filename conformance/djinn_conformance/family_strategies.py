"""Hypothesis strategies built from the operator families: tensors, single calls, and programs of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from djinn_conformance.families import OperatorSpec, domains
from djinn_conformance.forms import ListWord, LiteralWord, ScalarDomain, ScalarWord, TensorWord, Values, Word
from djinn_conformance.oracle import copied, seeded
from djinn_conformance.programs import RecordedCall, Recording, Ref, refs_in
from djinn_conformance.strategies import attempt

__all__ = ("call_batches", "calls", "elements", "laid_out", "programs")

_CPU = torch.device("cpu")


def elements(
    size: Sequence[int], dtype: torch.dtype, values: Values, seed: int, bound: int | None = None
) -> torch.Tensor:
    """Create a contiguous CPU tensor whose elements are drawn from a range with a separate seed."""
    generator = torch.Generator().manual_seed(seed)
    high = values.high if bound is None else bound - 1
    steps = max(int((high - values.low) / values.step), 0)
    if values.distinct:
        chosen = torch.randperm(torch.Size(size).numel(), generator=generator).view(tuple(size))
    else:
        chosen = torch.randint(0, steps + 1, tuple(size), generator=generator)
    # For a range of distinct elements, integers are distinct too.
    counts = values.distinct and not (dtype.is_floating_point or dtype.is_complex)
    whole = chosen.double() if counts else chosen.double() * values.step + values.low
    for excluded in values.exclude:
        whole = whole.where(whole != excluded, high)
    if values.special and whole.numel():
        odd = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0], dtype=torch.float64)
        places = torch.randint(0, 12, tuple(size), generator=generator)
        has_odd = dtype.is_floating_point or dtype.is_complex
        whole = whole.where((places > 3) | (not has_odd), odd[places.clamp(max=3)])
    if values.definite:
        whole = whole @ whole.mT + 4 * torch.eye(whole.shape[-1], dtype=torch.float64) if whole.dim() >= 2 else whole
    return _converted(whole, dtype, values)


def _converted(whole: torch.Tensor, dtype: torch.dtype, values: Values) -> torch.Tensor:
    if dtype is torch.bool:
        return whole > (values.low + values.high) / 2
    if dtype.is_complex:
        imaginary = torch.zeros_like(whole) if values.definite else whole.flip(-1) / 2 if whole.dim() else whole / 2
        return torch.complex(whole, imaginary).to(dtype)
    if dtype.is_floating_point:
        return whole.to(dtype)
    return (whole if dtype.is_signed else whole.abs()).trunc().to(dtype)


def _permuted(tensor: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return _offset(tensor)
    base = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    view = base[..., 1::2]
    return view.copy_(tensor)


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor.new_zeros(tensor.numel() + 3)
    return base[3:].view(tensor.shape).copy_(tensor)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else _permuted(tensor)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].clone().expand(tensor.shape) if tensor.dim() and tensor.shape[0] > 1 else tensor


def _overlapping(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2 or not tensor.numel():
        return _expanded(tensor)
    return tensor.as_strided(tensor.shape, (1,) * tensor.dim())


_LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "permuted": _permuted,
    "strided": _strided,
    "offset": _offset,
    "channels_last": _channels_last,
    "expanded": _expanded,
    "overlapping": _overlapping,
}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy a contiguous tensor into another memory layout; some layouts repeat elements."""
    return _LAYOUTS[layout](tensor)


@attrs.define
class _Caller:
    """Draws the arguments of one call.

    Attributes:
        draw: Hypothesis.
        spec: The operator.
        values: The program's values so far, by index; new tensors are added as inputs.
        inputs: The inputs so far.
        reuses: Whether tensors of the program are used where they fit.
    """

    draw: st.DrawFn
    spec: OperatorSpec
    values: dict[int, Any]
    inputs: list[torch.Tensor]
    reuses: bool
    dtype: torch.dtype | None = None
    size: tuple[int, ...] | None = None
    extents: dict[str, int] = attrs.field(factory=dict)
    batch: tuple[int, ...] | None = None
    length: int | None = None
    first: torch.Tensor | None = None

    def call(self) -> RecordedCall:
        """Draw a call; PyTorch may refuse it."""
        args = tuple(self.word(word) for word in self.spec.positional)
        return RecordedCall(self.spec.operator, args, {name: self.word(word) for name, word in self.spec.keywords}, 0)

    def word(self, word: Word) -> Any:
        if isinstance(word, LiteralWord):
            return list(word.value) if isinstance(word.value, list) else word.value
        if isinstance(word, ListWord):
            return [self.word(member) for member in word.words]
        if word.optional and self.draw(st.booleans()):
            return None
        if isinstance(word, ScalarWord):
            return self.draw(_scalars(word.domain, self.first))
        if not word.many:
            return self.tensor(word)
        if self.length is None:
            self.length = self.draw(st.integers(1, 3))
        return [self.tensor(word) for _ in range(self.length)]

    def tensor(self, word: TensorWord) -> Ref:
        found = self._reused(word) if self.reuses else None
        if found is None:
            dtype, size = self._dtype(word), self._size(word)
            values = domains().values[word.values or self.spec.values]
            made = elements(size, dtype, values, self.draw(st.integers(0, 999)), self._bound(word))
            found = self._input(laid_out(made, self.draw(st.sampled_from(self.spec.layouts))))
        if self.first is None:
            self.first = self.values[found.index]
        return found

    def _input(self, tensor: torch.Tensor) -> Ref:
        self.inputs.append(tensor)
        self.values[-len(self.inputs)] = copied(tensor, _CPU)
        return Ref(-len(self.inputs))

    def _reused(self, word: TensorWord) -> Ref | None:
        """Choose a tensor of the program, if one fits and there are no conditions on its elements."""
        if word.values or self.draw(st.integers(0, 3)) == 3:
            return None
        fitting = [index for index, value in self.values.items() if isinstance(value, torch.Tensor)
                   and self._fits(word, value)]
        if not fitting:
            return None
        chosen = self.draw(st.sampled_from(fitting + fitting[-3:]))
        value = self.values[chosen]
        if word.domain.dtype == "call" and self.dtype is None:
            self.dtype = value.dtype
        if word.size is None and self.size is None:
            self.size = tuple(value.shape)
        return Ref(chosen)

    def _fits(self, word: TensorWord, value: torch.Tensor) -> bool:
        if word.domain.dtype == "call" and self.dtype is None:
            if value.dtype not in self.spec.dtypes:
                return False
        elif word.domain.dtype == "fixed":
            if value.dtype not in domains().dtypes_named(*word.domain.fixed):
                return False
        elif value.dtype is not self.dtype:
            return False
        if word.size is not None:
            return self._is_bound(word.size) and tuple(value.shape) == self._extents(word.size)
        return self.size is None or tuple(value.shape) == self.size

    def _is_bound(self, size: tuple[str, ...]) -> bool:
        return all(name.isdigit() or name in self.extents or (name == "*" and self.batch is not None) for name in size)

    def _dtype(self, word: TensorWord) -> torch.dtype:
        domain = word.domain
        if domain.dtype == "fixed":
            return self.draw(st.sampled_from(domains().dtypes_named(*domain.fixed)))
        if domain.dtype == "any":
            return self.draw(st.sampled_from(self.spec.dtypes))
        if self.dtype is None:
            self.dtype = self.draw(st.sampled_from(self.spec.dtypes))
        return self.dtype.to_real() if domain.dtype == "real" else self.dtype

    def _size(self, word: TensorWord) -> tuple[int, ...]:
        if word.size is not None:
            return self._extents(word.size)
        if self.size is None:
            self.size = self.draw(st.sampled_from(domains().sizes))
        return self._broadcast(self.size) if word.broadcasts else self.size

    def _broadcast(self, size: tuple[int, ...]) -> tuple[int, ...]:
        kept = size[self.draw(st.integers(0, len(size))):] if self.draw(st.booleans()) else size
        ones = self.draw(st.integers(0, len(kept)))
        return (*(1 for _ in kept[:ones]), *kept[ones:]) if self.draw(st.booleans()) else kept

    def _extents(self, names: tuple[str, ...]) -> tuple[int, ...]:
        made: list[int] = []
        for name in names:
            if name == "*":
                if self.batch is None:
                    self.batch = self.draw(st.sampled_from(domains().batches))
                made += self.batch
            elif name.isdigit():
                made.append(int(name))
            else:
                if name not in self.extents:
                    self.extents[name] = self.draw(st.sampled_from(domains().extents))
                made.append(self.extents[name])
        return tuple(made)

    def _bound(self, word: TensorWord) -> int | None:
        if not word.bound:
            return None
        if word.bound == "first" and self.first is not None:
            return min(self.first.shape, default=1)
        return int(word.bound) if word.bound.isdigit() else self._extents((word.bound,))[0]


def _scalars(domain: ScalarDomain, first: torch.Tensor | None) -> st.SearchStrategy[Any]:
    """Create the strategy for a non-tensor argument; dimensions refer to the call's first tensor."""
    size = [] if first is None else list(first.shape)
    rank = len(size)
    made: Mapping[str, Callable[[], st.SearchStrategy[Any]]] = {
        "choice": lambda: st.sampled_from(domain.of),
        "integer": lambda: st.integers(domain.low, domain.high),
        "dimension": lambda: st.integers(-rank, max(rank - 1, 0)),
        "dimensions": lambda: st.lists(st.integers(0, max(rank - 1, 0)), max_size=rank, unique=True),
        "permutation": lambda: st.permutations(range(rank)),
        "size": lambda: st.sampled_from(domains().sizes).map(list),
        "own_size": lambda: st.just(size),
        "own_stride": lambda: st.just([] if first is None else list(first.stride())),
        "own_dtype": lambda: st.just(None if first is None else first.dtype),
        "last_size": lambda: st.just(size[-1:]),
        "dtype": lambda: st.sampled_from(domains().dtypes_named(*domain.of)),
        "device": lambda: st.just(_CPU),
        "memory_format": lambda: st.sampled_from([getattr(torch, name) for name in domain.of]),
    }
    return made[domain.kind]()


@st.composite
def calls(draw: st.DrawFn, spec: OperatorSpec) -> Recording:
    """Draw one call of an operator on new tensors. PyTorch may refuse it; the number of results is unknown."""
    caller = _Caller(draw, spec, {}, [], reuses=False)
    made = caller.call()
    return Recording(tuple(caller.inputs), (made,))


def call_batches(specs: Sequence[OperatorSpec]) -> st.SearchStrategy[tuple[Recording, ...]]:
    """Draw one call of each operator."""
    return st.tuples(*(calls(spec) for spec in specs))


@st.composite
def programs(
    draw: st.DrawFn, specs: Sequence[OperatorSpec], *, favoured: Sequence[OperatorSpec] = (), max_calls: int = 12,
    leaves_out: Callable[[RecordedCall, Mapping[int, Any]], bool] = lambda made, values: False,
) -> Recording:
    """Draw calls that eager PyTorch executes one after the other, later ones on the results of earlier ones.

    Args:
        draw: Hypothesis.
        specs: The operators to draw from.
        favoured: Operators that make up about half of the calls.
        max_calls: Most calls to try.
        leaves_out: Decides which calls to leave out, given the values that they use.
    """
    chosen = st.sampled_from(specs)
    chosen = chosen | st.sampled_from(favoured) if favoured else chosen
    values: dict[int, Any] = {}
    inputs: list[torch.Tensor] = []
    made: list[RecordedCall] = []
    with torch.no_grad(), seeded(_CPU, 0):
        for spec in draw(st.lists(chosen, min_size=max_calls // 2, max_size=max_calls)):
            drawn = _Caller(draw, spec, values, inputs, reuses=True).call()
            attempted = None if leaves_out(drawn, values) else attempt(drawn, values)
            if attempted is not None:
                made.append(attempted)
    return _without_unused(Recording(tuple(inputs), tuple(made)))


def _without_unused(recording: Recording) -> Recording:
    """Remove inputs that only refused calls used."""
    used = sorted({-1 - ref.index for made in recording.calls for ref in refs_in([made.args, made.kwargs])
                   if ref.index < 0})
    numbers = {-1 - old: -1 - new for new, old in enumerate(used)}

    def renamed(item: Any) -> Any:
        if isinstance(item, Ref):
            return Ref(numbers.get(item.index, item.index))
        if isinstance(item, (list, tuple)):
            return type(item)(renamed(member) for member in item)
        return {name: renamed(member) for name, member in item.items()} if isinstance(item, dict) else item

    return Recording(tuple(recording.inputs[index] for index in used), tuple(
        attrs.evolve(made, args=renamed(made.args), kwargs=renamed(made.kwargs)) for made in recording.calls))
