"""How operands have to lie in memory: classes of operators, and of layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.allowlist import ALLOWED, lists, release
from djinn_plugins.guard.calls import check_of
from djinn_plugins.guard.layouts import StridedLayout, arrangement_of, base_of, is_proven, layout_of, proven_groups

SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)
EXCEPTIONS = {"rrelu", "max", "min"}
"""What PyTorch tags as pointwise and is not listed: a kernel that writes noise, and names that reductions have, too."""


@given(SIZES)
def test_no_overlap_is_missed_and_dense_means_dense(dims: list[tuple[int, int]]) -> None:
    size, stride = tuple(extent for extent, _ in dims), tuple(step for _, step in dims)
    places = [sum(index * step for index, step in zip(where, stride, strict=True))
              for where in itertools.product(*map(range, size))]
    layout = layout_of(size, stride)
    if len(set(places)) < len(places):
        assert layout is StridedLayout.OVERLAPPING
    if layout is StridedLayout.DENSE:
        assert sorted(places) == list(range(len(places)))
    elif layout is StridedLayout.GAPS:
        assert max(places) >= len(places)


@pytest.mark.parametrize(("layout", "view"), [
    (StridedLayout.DENSE, torch.empty(2, 3, 4).permute(2, 0, 1)),
    (StridedLayout.DENSE, torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    (StridedLayout.DENSE, torch.empty(1).expand(1, 1)),
    (StridedLayout.GAPS, torch.empty(2, 3, 4)[:, 1:]),
    (StridedLayout.OVERLAPPING, torch.empty(1).expand(2)),
    (StridedLayout.OVERLAPPING, torch.empty(8).unfold(0, 4, 2)),
])
def test_views_as_users_make_them(layout: StridedLayout, view: torch.Tensor) -> None:
    assert layout_of(tuple(view.shape), view.stride()) is layout


def allowed() -> Iterator[torch._ops.OpOverload]:
    return (operator_named(name) for name, group in lists()[release()].items() if group == ALLOWED)


def test_what_is_in_no_class_is_made_dense() -> None:
    library = torch.library.Library("djinn_test_layouts", "DEF")
    library.define("unheard_of(Tensor x) -> Tensor")
    library.define("unheard_of_view(Tensor(a) x) -> Tensor(a)")
    operators = torch.ops.djinn_test_layouts
    assert not is_proven(operators.unheard_of.default)
    assert arrangement_of(operators.unheard_of.default, 0) is not None
    assert is_proven(operators.unheard_of_view.default)
    known = {base_of(operator) for operator in allowed()}
    dense = {base_of(operator) for operator in allowed() if not is_proven(operator)}
    assert len(dense) > 300
    for name in ("rrelu_with_noise", "rrelu_with_noise_", "_fused_adam_", "native_group_norm", "median", "rrelu",
                 "adaptive_max_pool2d_backward", "_embedding_bag", "_ctc_loss", "mkldnn_rnn_layer"):
        assert name in dense
    assert dense < known


def test_the_list_names_what_exists_and_each_once() -> None:
    names = [name for group in proven_groups().values() for name in group]
    assert len(names) == len(set(names))
    known = {base_of(operator) for operator in allowed()}
    assert [name for name in names if name not in known and f"{name}_" not in known] == []


def test_iterators_are_what_pytorch_says_they_are() -> None:
    """PyTorch tags what is done to each element for itself; what is generated from one kernel is so by structure."""
    torchgen = pytest.importorskip("torchgen")
    yaml = pytest.importorskip("yaml")
    listed = proven_groups()["iterators"]
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    read = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    functions = {entry["func"].partition("(")[0]: entry for entry in read}

    def is_structured(name: str) -> bool:
        # Some overloads are generated, and not written there.
        entry = functions.get(name, {})
        delegate = entry.get("structured_delegate")
        return entry.get("structured_inherits") == "TensorIteratorBase" or bool(delegate and is_structured(delegate))

    for operator in allowed():
        name = base_of(operator)
        if is_structured(operator.name().removeprefix("aten::")):
            assert name in listed or name.removesuffix("_") in listed, name
        elif torch.Tag.pointwise in operator.tags and name not in EXCEPTIONS:
            assert is_proven(operator), name


def test_what_onednn_computes_is_not_stretched() -> None:
    """By metadata only. PyTorch itself never asks for a gradient of another size than the operand."""
    check = check_of(torch.ops.aten.gelu_backward.default, 0)
    assert check is not None

    def ask(*size: int) -> None:
        check.expect((torch.empty(size, device="meta"), torch.empty(2, 3, device="meta")), {})

    ask(2, 3)
    for size in ((3,), (1, 3), (1,), (), (2, 2, 3)):
        with pytest.raises(RuntimeError, match="grad_output has the size"):
            ask(*size)
