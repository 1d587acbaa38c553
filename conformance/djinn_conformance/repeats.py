"""Functions called again with one argument changed: tests the keys of the session's caches for calls."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's conventional name

from djinn.session import runtime
from djinn_conformance.database import MOST_ELEMENTS, Direction, Unit, operators
from djinn_conformance.expectations import expected
from djinn_conformance.remote_calls import compare, copies, sent
from djinn_conformance.seeding import quietly, undisturbed

__all__ = ("Repeat", "combinations", "differences", "named", "repeats")

_SEED = 20_261
_STEPS = 10
_Outcome: TypeAlias = tuple[Any, BaseException | None]
_REALS = (0.0, 0.1, 1.0, 2.0, -0.5)


@attrs.frozen
class Repeat:
    """Consecutive calls of one entry of the database of operator samples.

    Attributes:
        entry: Name of the entry, or of another function.
        tensor: The first argument of all calls.
        calls: Other arguments of each.
    """

    entry: str
    tensor: Any
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]


def _alternatives(value: Any, seen: Sequence[Any]) -> list[Any]:
    """List alternatives for a plain argument: values from other samples, and other real numbers.

    Other integers may not be valid modes of an operator, and kernels may then read out of bounds.
    """
    found = [other for other in seen if type(other) is type(value) or None in (other, value)]
    if type(value) is bool:
        found.append(not value)
    elif type(value) is float:
        found += _REALS
    return [other for other in dict.fromkeys(found) if repr(other) != repr(value)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


_DOMAINS: Mapping[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], Mapping[str, tuple[Any, ...]]]] = {
    "attention": (F.scaled_dot_product_attention, ((1, 2, 8, 4),) * 3,
                  {"dropout_p": (0.0, 0.1, 0.5), "is_causal": (True, False), "scale": (None, 0.5, 0.0)}),
    "layer_norm": (F.layer_norm, ((3, 8),), {"normalized_shape": ([8],), "eps": (1e-5, 0.5, 0.0)}),
    "rms_norm": (F.rms_norm, ((3, 8),), {"normalized_shape": ([8],), "eps": (None, 1e-5, 0.5, 0.0)}),
    "group_norm": (F.group_norm, ((2, 4, 3),), {"num_groups": (1, 2, 4), "eps": (1e-5, 0.5, 0.0)}),
    "linalg.norm": (torch.linalg.norm, ((3, 3),), {"ord": (None, 2.0, 1.0, math.inf, -math.inf, -1.0, "fro", "nuc")}),
    "norm": (torch.norm, ((3, 3),), {"p": ("fro", 2.0, 1.0, 0.0, 0.5, math.inf), "dim": (None, 0, 1)}),
    "add": (torch.add, ((3, 4), (3, 4)), {"alpha": (1, 0.0, -0.0, 2.5, True)}),
    "sub": (torch.sub, ((3, 4), (3, 4)), {"alpha": (1, 0.0, -0.0, 2.5, True)}),
    "addmm": (torch.addmm, ((4,), (3, 4), (4, 4)), {"beta": (1, 0, 0.0, 0.5), "alpha": (1, 0, 0.0, 0.5)}),
    "clamp": (torch.clamp, ((3, 4),), {"min": (None, 0.0, -1.0, math.nan), "max": (None, 1.0, 0.0)}),
    "pow": (torch.pow, ((3, 4),), {"exponent": (0.0, 1.0, 2.0, 0.5, -1.0, 2, 3)}),
    "div": (torch.div, ((3, 4), (3, 4)), {"rounding_mode": (None, "floor", "trunc")}),
    "softmax": (F.softmax, ((3, 4),), {"dim": (0, 1, -1), "dtype": (None, torch.float64, torch.float32)}),
    "gelu": (F.gelu, ((3, 4),), {"approximate": ("none", "tanh")}),
    "sum": (torch.sum, ((3, 4),), {"dim": (0, 1, -1), "keepdim": (False, True)}),
    "embedding": (F.embedding, ((), (4, 3)), {"padding_idx": (None, 0, 1)}),
}
"""Functions that choose between operators: tensors, and the possible values of each other argument."""


def combinations(choose: random.Random, dtype: torch.dtype) -> Iterator[Repeat]:
    """Yield calls of functions that choose between operators, changing one plain argument at a time."""
    for name, (_, sizes, domains) in _DOMAINS.items():
        generator = torch.Generator().manual_seed(_SEED)
        first, *others = [torch.randn(size, generator=generator, dtype=dtype) if size else torch.arange(3)
                          for size in sizes]
        kwargs = {word: values[0] for word, values in domains.items()}
        calls = []
        for _ in range(4 * _STEPS):
            calls.append((tuple(others), kwargs))
            word = choose.choice(list(domains))
            kwargs = {**kwargs, word: choose.choice(domains[word])}
        yield Repeat(name, first, tuple(calls))


def _function(entry: str) -> Callable[..., Any]:
    return _DOMAINS[entry][0] if entry in _DOMAINS else operators()[entry]


@lru_cache(maxsize=1)
def named() -> tuple[str, ...]:
    """List the entries that users call, without PyTorch's internal ones and those that are expected to differ."""
    return tuple(name for name, op in operators().items()
                 if torch.float32 in op.supported_dtypes("cpu") and not name.startswith("_") and "native" not in name
                 and not expected(Unit(name, "float32", Direction.FORWARD), "cpu"))


def repeats(entry: str, choose: random.Random, most: int, dtype: torch.dtype = torch.float32) -> Iterator[Repeat]:
    """Yield samples of an entry, each followed by copies with one plain argument changed.

    Args:
        entry: Name of the entry; see `djinn_conformance.database.operators`.
        choose: Chooses samples and changes.
        most: How many samples.
        dtype: Dtype of the samples.
    """
    with quietly():
        torch.manual_seed(_SEED)
        samples = [sample for sample in operators()[entry].sample_inputs("cpu", dtype)
                   if isinstance(sample.input, torch.Tensor) and sample.input.numel() <= MOST_ELEMENTS]
    places = [[*enumerate(sample.args), *sample.kwargs.items()] for sample in samples]
    seen: dict[Any, list[Any]] = {}
    for place, value in (pair for pairs in places for pair in pairs):
        if _is_plain(value):
            seen.setdefault(place, []).append(value)
    # Samples with the most changeable arguments test the most.
    ranks = {index: (-sum(_is_plain(value) for _, value in pairs), choose.random())
             for index, pairs in enumerate(places)}
    for index in sorted(ranks, key=ranks.__getitem__)[:most]:
        sample = samples[index]
        original = tuple(sample.args), dict(sample.kwargs)
        changeable = [place for place, value in places[index]
                      if _is_plain(value) and _alternatives(value, seen.get(place, ()))]
        if not changeable:
            continue
        calls = [_zeroed(original), original]
        for _ in range(_STEPS):
            args, kwargs = calls[-1]
            place = choose.choice(changeable)
            others = _alternatives(args[place] if isinstance(place, int) else kwargs[place], seen.get(place, ()))
            calls.append(_changed(calls[-1], place, choose.choice(others)) if others else original)
        calls.append(original)
        # Cached results of an earlier call do not apply to another dtype.
        yield Repeat(entry, sample.input, tuple(calls if dtype is torch.float32 else reversed(calls)))


def _zeroed(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, Any]:
    args, kwargs = call
    return tuple(0.0 if type(item) is float else item for item in args), {
        name: 0.0 if type(item) is float else item for name, item in kwargs.items()}


def _changed(call: tuple[tuple[Any, ...], dict[str, Any]], place: Any, other: Any) -> tuple[Any, Any]:
    args, kwargs = call
    if isinstance(place, int):
        return (*args[:place], other, *args[place + 1:]), kwargs
    return args, {**kwargs, place: other}


def _outcome(action: Callable[[], Any]) -> _Outcome:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001  # any exception is the outcome
        return None, error


def _called(entry: Any, arguments: Any) -> _Outcome:
    tensor, args, kwargs = arguments
    torch.manual_seed(_SEED)
    return _outcome(lambda: entry(tensor, *args, **kwargs))


def differences(repeat: Repeat, device: torch.device, mode: Any) -> list[str]:
    """Make the calls in this process and on the remote device, and return which outcomes differ.

    Args:
        repeat: The calls.
        device: The remote device.
        mode: ``torch.no_grad`` or ``torch.inference_mode``.
    """
    entry = _function(repeat.entry)
    found: list[str] = []
    with undisturbed(), mode():
        there = sent((repeat.tensor, repeat.calls), device)
        here = copies((repeat.tensor, repeat.calls))
        # Everything is recorded before anything is compared, because the caches are filled from pending calls.
        made = [(_called(entry, (here[0], *call)), _called(entry, (there[0], *other)), original)
                for call, other, original in zip(here[1], there[1], repeat.calls, strict=True)]
        _, reported = _outcome(runtime.current().synchronize)
        for number, (wanted, got, original) in enumerate(made):
            different = _difference(got, wanted, reported, f"call {number} of {repeat.entry}{_shown(original)}")
            found += [] if different is None else [different]
    return found


def _difference(got: _Outcome, wanted: _Outcome, reported: BaseException | None, where: str) -> str | None:
    """Describe how an outcome differs from eager's, if it does; ``reported`` is the session's reported failure."""
    (result, raised), (expected_result, refused) = got, wanted
    if raised is None and refused is None:
        different = _outcome(lambda: compare(result, expected_result, "result", where))[1]
        return None if different is None else f"{where}: {different!r}"
    if raised is None:
        # A failed write leaves its tensor unchanged, and is reported once.
        raised = _outcome(lambda: runtime.current().materialize(_tensors(result)))[1] or reported
    return None if type(raised) is type(refused) else f"{where}: {raised!r}, should be {refused!r}"


def _shown(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> str:
    args, kwargs = call
    words = [*map(_word, args), *(f"{name}={_word(value)}" for name, value in kwargs.items())]
    return f"({', '.join(words)})"


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:100]


def _tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return [tensor for member in members for tensor in _tensors(member)]
