"""Programs of three to six calls: a changed call, writes to what it takes and gives, and calls that use that again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from support.operators.corpus import Corpus
from support.operators.elements import FAR
from support.operators.synthesis import base_of, family, values_of

from djinn.ir.spec import tensors_in
from djinn_conformance.programs import Ref
from djinn_plugins.guard.allowlist import ALLOWED, group_of

Calls: TypeAlias = list[tuple[str, dict[str, Any]]]
"""Overloads with arguments by name; a `Ref` stands for a result of an earlier one."""
Act: TypeAlias = "Callable[[_Sequence], tuple[str, dict[str, Any]]]"
LENGTHS = (3, 3, 4, 4, 5, 6)
SIZES = ([0], [1], [2], [7], [2, 3], [33], [1, 129])


def sequence_of(
    name: str, values: dict[str, Any], results: int, corpus: Corpus, choose: random.Random, extents: Sequence[int],
) -> Calls:
    """Put calls behind a first one.

    Args:
        name: The first overload.
        values: Its arguments.
        results: How many results it has.
        corpus: Calls of others.
        choose: Makes all choices.
        extents: Those of the first call's tensors.
    """
    made = _Sequence(name, values, results, corpus, choose, extents)
    length = choose.choice(LENGTHS)
    while len(made.calls) < length - 1:
        made.add(choose.choice(BETWEEN))
    made.add(choose.choice(LAST))
    return made.calls


class _Sequence:
    """Calls that are being put together."""

    def __init__(self, name: str, values: dict[str, Any], results: int, corpus: Corpus, choose: random.Random,
                 extents: Sequence[int]) -> None:
        self.calls: Calls = [(name, values)]
        self.choose, self.corpus, self.extents = choose, corpus, extents
        self.operands = tensors_in(values.values())
        self.results = [Ref(index) for index in range(results)]
        self.integers = [tensor for tensor in self.operands if tensor.dtype in (torch.int64, torch.int32)]

    def add(self, act: Act) -> None:
        """Put one more call behind the others."""
        name, values = act(self)
        if group_of(name) == ALLOWED:
            self.calls.append((name, values))

    def value(self) -> Any:
        """Choose an operand or a result."""
        if self.integers and self.choose.random() < 0.4:
            return self.choose.choice(self.integers)
        return self.choose.choice([*self.operands, *self.results] or [torch.zeros(2)])


def _fill(made: _Sequence) -> tuple[str, dict[str, Any]]:
    near = made.choose.choice(made.extents or (1,))
    value = made.choose.choice((near, near - 1, -1, -near, 0, made.choose.choice(FAR)))
    return "aten::fill_.Scalar", {"self": made.value(), "value": value}


def _copy(made: _Sequence) -> tuple[str, dict[str, Any]]:
    return "aten::copy_", {"self": made.value(), "src": made.value(), "non_blocking": False}


def _count(made: _Sequence) -> tuple[str, dict[str, Any]]:
    return "aten::add_.Scalar", {"self": made.value(), "other": made.choose.choice((1, -1, 2, 1000)), "alpha": 1}


def _add(made: _Sequence) -> tuple[str, dict[str, Any]]:
    return "aten::add_.Tensor", {"self": made.value(), "other": made.value(), "alpha": 1}


def _reshape(made: _Sequence) -> tuple[str, dict[str, Any]]:
    """Change what an operand is like, in place."""
    name, more = made.choose.choice((
        ("aten::unsqueeze_", {"dim": 0}), ("aten::squeeze_", {}), ("aten::t_", {}),
        ("aten::transpose_", {"dim0": 0, "dim1": -1}), ("aten::resize_", {"size": made.choose.choice(SIZES)}),
        ("aten::as_strided_", {"size": [2], "stride": [made.choose.choice((0, 1))]}),
        ("aten::resize_as_", {"the_template": made.value()})))
    return name, {"self": made.value(), **more}


def _again(made: _Sequence) -> tuple[str, dict[str, Any]]:
    """Make the first call again, perhaps with another value in one place."""
    name, values = made.calls[0]
    values = dict(values)
    places = [key for key, item in values.items() if isinstance(item, torch.Tensor)]
    if places and made.choose.random() < 0.3:
        values[made.choose.choice(places)] = made.value()
    return name, values


def _read(made: _Sequence) -> tuple[str, dict[str, Any]]:
    name, more = made.choose.choice((
        ("aten::clone", {}), ("aten::sum", {}), ("aten::add.Tensor", {"other": made.value()}), ("aten::abs", {}),
        ("aten::_to_copy", {"dtype": torch.float64}), ("aten::mul.Tensor", {"other": made.value()}),
        ("aten::index_select", {"dim": 0, "index": made.value()}), ("aten::masked_select", {"mask": made.value()})))
    return name, {"self": made.value(), **more}


def _other(made: _Sequence) -> tuple[str, dict[str, Any]]:
    """Call a relative, or any overload, with one or two values of this sequence among its arguments."""
    names = _relatives(made.calls[0][0], tuple(made.corpus.calls)) if made.choose.random() < 0.6 else ()
    name = made.choose.choice(names or tuple(made.corpus.calls))
    known = made.corpus.examples(name)
    if not known:
        return _read(made)
    values = {key: _fresh(item) for key, item in values_of(name, made.choose.choice(known)).items()}
    for _ in range(made.choose.choice((1, 1, 2))):
        places = [key for key, item in values.items() if isinstance(item, torch.Tensor)]
        if places:
            key = made.choose.choice(places)
            values[key] = _fitting(made, values[key])
    return name, values


def _fitting(made: _Sequence, wanted: torch.Tensor) -> Any:
    """Choose a value of as many dimensions and the same dtype, if there is one."""
    fitting = [tensor for tensor in made.operands if tensor.dtype == wanted.dtype and tensor.dim() == wanted.dim()]
    return made.choose.choice(fitting) if fitting and made.choose.random() < 0.7 else made.value()


def _fresh(item: Any) -> Any:
    """Copy what is the corpus's own."""
    if isinstance(item, torch.Tensor):
        return item.clone()
    return [_fresh(member) for member in item] if isinstance(item, (list, tuple)) else item


@cache
def _relatives(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Name overloads that do the same in another way, or its gradient."""
    stem = family(base_of(name)).removesuffix("_backward")
    return tuple(other for other in known if family(base_of(other)).removesuffix("_backward") == stem and other != name)


BETWEEN: tuple[Act, ...] = (_fill, _fill, _copy, _count, _add, _reshape, _other)
LAST: tuple[Act, ...] = (_again, _again, _read, _read, _other)


def text_of(calls: Calls, example_text: Callable[[Mapping[str, Any]], str]) -> str:
    """Write a sequence down for people."""
    return "; ".join(f"{name}({example_text(values)})" for name, values in calls)
