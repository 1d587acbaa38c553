"""Results of a server have eager's values and strides, also where its guard copies operands or looks at elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import djinn

aten = torch.ops.aten


class Operands:
    """Operands on one device, made alike on each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def of(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a contiguous tensor."""
        numbers = torch.arange(torch.Size(size).numel(), dtype=torch.float64)
        return numbers.mul(0.37).sin().view(size).to(dtype).to(self.device)

    def whole(self, *numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Make a tensor of integers."""
        return torch.tensor(numbers, dtype=dtype).to(self.device)


def _batch_norm(make: Operands, *, training: bool) -> list[torch.Tensor]:
    statistics = [make.of(3, 2)[:, 0], make.of(3).abs() + 1]
    results = aten.native_batch_norm(make.of(2, 3, 5, dtype=torch.bfloat16).float(), make.of(3), None, *statistics,
                                     training, 0.5, 1e-3)
    return [*results, *statistics]


def _no_statistics(make: Operands) -> list[torch.Tensor]:
    stretched = make.of(3, dtype=torch.float16)[1:2].expand(3)
    return list(aten._native_batch_norm_legit.no_stats(
        make.of(5, 3, 1, dtype=torch.float16).expand(5, 3, 4), stretched, stretched, True, 0.5, 1e-3))


def _bags(make: Operands) -> torch.Tensor:
    """Give the gradient of bags of which the last offset begins none."""
    indices, offsets, none = make.whole(0, 2, 1, 4, 3, 2), make.whole(0, 3, 6), make.whole()
    return aten._embedding_bag_backward(
        make.of(2, 5), indices, offsets, none, make.whole(3, 3), none, 5, False, 0, False, None)


def _lists(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


def _diagonal(make: Operands) -> torch.Tensor:
    return make.of(5, 2)[:, :1].fill_diagonal_(2.0, wrap=True)


def _by(act: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Operands], Any]:
    """Give it six numbers, and six indices in another order."""
    return lambda make: act(make.of(6), make.whole(5, 2, 0, 1, 4, 3))


ALIKE: dict[str, Callable[[Operands], Any]] = {
    "fft of an expanded signal": lambda make: torch.fft.fftn(make.of(1, 3, 4, dtype=torch.complex64).expand(2, 3, 4)),
    "fft of expanded batches": lambda make: torch.fft.fft2(
        make.of(1, 3, 3, 4, dtype=torch.complex64).expand(2, 3, 3, 4)),
    "fft of every other element": lambda make: torch.fft.ifftn(make.of(2, 3, 9, dtype=torch.complex64)[..., 1::2]),
    "real fft of overlapping windows": lambda make: torch.fft.rfftn(make.of(9).as_strided((2, 3, 4), (1, 1, 1))),
    "stft of a batch that is expanded": lambda make: torch.stft(
        make.of(1, 8).expand(2, 8), 4, window=make.of(4), return_complex=True),
    "native_batch_norm that trains": lambda make: _batch_norm(make, training=True),
    "native_batch_norm that does not": lambda make: _batch_norm(make, training=False),
    "batch norm in half precision of an expanded input": _no_statistics,
    "batch norm with expanded statistics that are read": lambda make: aten._native_batch_norm_legit_no_training(
        make.of(2, 3, 2), None, None, make.of(1).expand(3), make.of(1).abs().expand(3), 0.5, 1e-3),
    "gradient of a batch norm from an expanded one": lambda make: aten.native_batch_norm_backward(
        make.of(1, 3, 9).expand(7, 3, 9), make.of(7, 3, 9), make.of(3), None, None, make.of(3), make.of(3).abs() + 0.5,
        True, 1e-3, [True, True, True]),
    "gradient of a huber loss of expanded operands": lambda make: aten.huber_loss_backward(
        make.of(1), make.of(9).expand(9, 9), make.of(9, 1).expand(9, 9), 0, 0.6),
    "kron of every other column": lambda make: torch.kron(
        make.of(5, 6, dtype=torch.complex64)[:, ::2], make.of(3, 4, dtype=torch.complex64)),
    "dot of every other element": lambda make: torch.dot(make.of(99, 2)[:, 0], make.of(99)),
    "as_strided_copy of rows of a larger tensor": lambda make: aten.as_strided_copy(make.of(3, 9)[:, 1::2], [2, 2],
                                                                                   [2, 1]),
    "complex of expanded parts": lambda make: torch.complex(
        make.of(1, 3, 2).expand(2, 3, 2), make.of(2, 3, 2).transpose(0, 2).contiguous().transpose(0, 2)),
    "_linalg_det": lambda make: aten._linalg_det(make.of(1, 3).expand(3, 3)),
    "fill_diagonal_": _diagonal,
    "_embedding_bag_backward": _bags,
    "_embedding_bag_per_sample_weights_backward": lambda make: aten._embedding_bag_per_sample_weights_backward(
        make.of(1, 1).expand(2, 9), make.of(7, 9), make.whole(0, 2, 1, 5), make.whole(0, 2), make.whole(0, 0, 1, 1), 0),
    "segment_reduce of some rows": lambda make: torch.segment_reduce(
        make.of(6, 2), "max", lengths=make.whole(1, 2), unsafe=True),
    "lcm of two dtypes": lambda make: torch.lcm(make.whole(0, 4, 6), make.whole(0, 3, 8, dtype=torch.uint8)),
    "cumsum into its input": _by(lambda x, i: torch.cumsum(x, 0, out=x)),
    "scatter into its input": _by(lambda x, i: torch.scatter(x, 0, i, x.clone(), out=x)),
    "maximum into its input": _by(lambda x, i: torch.max(x, i.float(), out=x)),
    "gather of an expanded tensor into its element": _by(
        lambda x, i: torch.gather(x[:1].expand(6), 0, i[:1], out=x[:1])),
    "div of two dtypes": lambda make: torch.div(make.whole(0, 4, -6, dtype=torch.int32), make.whole(-1, 255, -1),
                                                rounding_mode="trunc"),
}


@pytest.mark.parametrize("name", list(ALIKE))
def test_results_have_eagers_values_and_strides(session: Any, name: str) -> None:
    with torch.no_grad():
        wanted = _lists(ALIKE[name](Operands(torch.device("cpu"))))
        made = _lists(ALIKE[name](Operands(torch.device("remote_accelerator", 0))))
    for mine, theirs in zip(djinn.materialize(made), wanted, strict=True):
        # What travels is dense.
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.clone().stride())
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def _kth(tensor: torch.Tensor) -> Any:
    return torch.kthvalue(tensor, 2, out=(tensor, torch.zeros((), dtype=torch.int64, device=tensor.device)))


def _selected(tensor: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(tensor, tensor > 0, out=tensor)


WRONG: dict[str, Callable[[Operands], Any]] = {
    "masked_select into its input": lambda make: _selected(make.of(6)),
    "kthvalue into its input": lambda make: _kth(make.of(6)),
    "gather into its input": _by(lambda x, i: torch.gather(x, 0, i, out=x)),
    "index_select into its input": _by(lambda x, i: torch.index_select(x, 0, i, out=x)),
    "index_add_ of itself": _by(lambda x, i: x.index_add_(0, i, x)),
    "scatter_ of itself": _by(lambda x, i: x.scatter_(0, i, x)),
    "cumsum one behind": _by(lambda x, i: torch.cumsum(x[:5], 0, out=x[1:])),
    "sort one behind": _by(lambda x, i: torch.sort(x[:5], out=(x[1:], i[:5]))),
    "topk into its input": _by(lambda x, i: torch.topk(x, 2, out=(x[:2], i[:2]))),
    "view_as_complex_copy of other rows": lambda make: aten.view_as_complex_copy(make.of(2, 3, 5)[..., 1:3:2]),
    "segments beyond the rows": lambda make: torch.segment_reduce(
        make.of(6, 2), "max", lengths=make.whole(5, 2), unsafe=False),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_eager_refuses_a_server_refuses(session: Any, name: str) -> None:
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            WRONG[name](Operands(torch.device("cpu")))
        with pytest.raises(RuntimeError):
            djinn.materialize(_lists(WRONG[name](Operands(torch.device("remote_accelerator", 0)))))
