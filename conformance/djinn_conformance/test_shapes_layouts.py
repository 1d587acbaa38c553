"""Laws of shape inference about operands that lie in memory in different ways."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from djinn.kinds import OutputSpec, ShapeInference
from djinn_conformance.assertions import expect_equal
from djinn_conformance.database import operators
from djinn_conformance.inference import placeholder
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.layouts import Operands, drawn_calls, recorded_calls, unlike, with_layouts
from djinn_conformance.subjects import Subject

_GROUPS = 16
_ROUNDS, _SAMPLES, _EVERY = (12, 12, 1) if is_thorough() else (4, 3, 6)
_DRAWN = 8_000 if is_thorough() else 1_500
_DTYPES = (torch.float32, torch.bfloat16, torch.int64) if is_thorough() else (torch.float32,)


def _specs(results: object) -> list[tuple[object, ...]]:
    """List metadata of results, with every stride as it is."""
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


@law("shapes.layouts_recorded")
@pytest.mark.parametrize("group", range(_GROUPS))
def test_layouts_recorded(subject: Subject, plugin: ShapeInference, group: int) -> None:
    """Ask about calls of PyTorch's database, forward and backward, each operand laid out in a way of its own."""
    names = [name for index, name in enumerate(operators()) if index % _EVERY == 0 and not name.startswith("jiterator")]
    for name in names[group::_GROUPS]:
        choose = random.Random(name)
        for dtype in _DTYPES:
            for call in unlike(recorded_calls(name, dtype, _SAMPLES)):
                for _ in range(_ROUNDS):
                    _check(subject, plugin, with_layouts(call, choose))


@law("shapes.layouts_drawn")
@pytest.mark.parametrize("group", range(4))
def test_layouts_drawn(subject: Subject, plugin: ShapeInference, group: int) -> None:
    """Ask about operators of which layouts are known, on sizes with many ones and operands that broadcast."""
    for call in drawn_calls(random.Random(group), _DRAWN // 4):
        _check(subject, plugin, call)
