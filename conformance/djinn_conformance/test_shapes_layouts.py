"""The laws of shape inference about operands with different memory layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten, tree_map_only

from djinn.kinds import OutputSpec, ShapeInference
from djinn_conformance.assertions import expect_equal
from djinn_conformance.database import operators
from djinn_conformance.elementwise import calls_of, operands
from djinn_conformance.inference import placeholder
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.layouts import Operands, drawn_calls, recorded_calls, unlike, with_layouts
from djinn_conformance.subjects import Subject

_GROUPS, _DRAWN_GROUPS = 16, 4
_ROUNDS, _SAMPLES, _EVERY = (12, 12, 1) if is_thorough() else (4, 3, 6)
_DRAWN = 8_000 if is_thorough() else 1_500
_DTYPES = (torch.float32, torch.bfloat16, torch.int64) if is_thorough() else (torch.float32,)


def _specs(results: object) -> list[tuple[object, ...]]:
    """List metadata of results, with every stride unchanged."""
    return [(tuple(item.size()), tuple(item.stride()), item.storage_offset(), item.dtype)
            if isinstance(item, torch.Tensor) else
            (tuple(item.size), tuple(item.stride), item.storage_offset, item.dtype)
            for item in tree_flatten(results)[0] if isinstance(item, (torch.Tensor, OutputSpec))]


def _check(subject: Subject, plugin: ShapeInference, call: Operands) -> None:
    operator, args, kwargs = call
    stand_ins = tree_map_only(torch.Tensor, placeholder, (args, kwargs))
    answer = plugin.infer(operator, *stand_ins)
    if answer is None:
        return
    layouts = [(tuple(leaf.size()), leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf
               for leaf in tree_flatten((args, kwargs))[0]]
    where = f"{subject}: {operator.name()} of {layouts}"
    try:
        with torch.no_grad():
            wanted = operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as error:
        raise AssertionError(f"answer {answer}, should be None, as eager raises {error!r} [{where}]") from error
    expect_equal(_specs(answer.results), _specs(wanted), "metadata of results", where)


@law("shapes.layouts_equal")
@pytest.mark.parametrize("part", [*(f"recorded-{index}" for index in range(_GROUPS)),
                                  *(f"drawn-{index}" for index in range(_DRAWN_GROUPS))])
def test_layouts_equal(subject: Subject, plugin: ShapeInference, part: str) -> None:
    """Query calls of PyTorch's database, forward and backward, and drawn ones, in layouts of all kinds."""
    kind, _, group = part.partition("-")
    calls = _recorded(int(group)) if kind == "recorded" else drawn_calls(random.Random(part), _DRAWN // _DRAWN_GROUPS)
    for call in calls:
        _check(subject, plugin, call)


@law("shapes.elementwise_layouts")
@given(tensors=st.integers(1, 3).flatmap(operands))
def test_elementwise_layouts(subject: Subject, plugin: ShapeInference, tensors: list[torch.Tensor]) -> None:
    """Query every element-wise operator about operands of any layout, dtype and size."""
    for call in calls_of(tensors):
        if _is_carried_out(call):
            _check(subject, plugin, call)


def _is_carried_out(call: Operands) -> bool:
    operator, args, kwargs = call
    try:
        with torch.no_grad():
            operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return False
    return True


def _recorded(group: int) -> Iterator[Operands]:
    names = [name for index, name in enumerate(operators()) if index % _EVERY == 0 and not name.startswith("jiterator")]
    for name in names[group::_GROUPS]:
        choose = random.Random(name)
        for dtype in _DTYPES:
            for call in unlike(recorded_calls(name, dtype, _SAMPLES)):
                for _ in range(_ROUNDS):
                    yield with_layouts(call, choose)
