"""Memory of large tensors is used again when nobody can see it any more, and never before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from djinn.wire.messages import TensorHeader
from djinn_plugins.transport.tcp import memory
from djinn_plugins.transport.tcp.memory import LARGE_BYTES, MAX_KEPT_BYTES, Reserve


@pytest.fixture
def reserve() -> Iterator[Reserve]:
    made = Reserve()
    yield made
    made.close()


def header(length: int = LARGE_BYTES, dtype: str = "uint8") -> TensorHeader:
    return TensorHeader(dtype, (length,), (1,))


def test_it_is_used_again_once_its_tensor_is_gone(reserve: Reserve) -> None:
    first = reserve.empty(header())
    address = first.data_ptr()
    assert reserve.empty(header()).data_ptr() != address
    del first
    again = reserve.empty(TensorHeader("float32", (2, LARGE_BYTES // 8), (1, 2)))
    assert again.data_ptr() == address
    assert (again.dtype, again.shape, again.stride()) == (torch.float32, (2, LARGE_BYTES // 8), (1, 2))
    assert (again._version, again._base, again.is_inference(), again.is_leaf) == (0, None, False, True)


@pytest.mark.parametrize("hold", [
    lambda tensor: tensor[5:6], lambda tensor: tensor.untyped_storage(), lambda tensor: tensor.view(torch.int8),
    lambda tensor: tensor.numpy(), lambda tensor: tensor.detach(), torch.utils.dlpack.to_dlpack,
], ids=["view", "storage", "dtype", "numpy", "detach", "dlpack"])
def test_it_is_not_used_again_while_anybody_sees_it(reserve: Reserve, hold: Callable[[torch.Tensor], object]) -> None:
    tensor = reserve.empty(header())
    address = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    others = [reserve.empty(header()) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    del held
    assert reserve.empty(header()).data_ptr() == address


def test_a_tensor_that_got_other_memory_keeps_it(reserve: Reserve) -> None:
    tensor = reserve.empty(header())
    tensor.resize_(2 * LARGE_BYTES)
    storage = tensor.untyped_storage()
    assert storage.nbytes() == 2 * LARGE_BYTES
    del tensor, storage
    assert reserve.empty(header()).untyped_storage().nbytes() == LARGE_BYTES


def test_another_size_gets_other_memory(reserve: Reserve) -> None:
    address = reserve.empty(header()).data_ptr()
    made = reserve.empty(header(LARGE_BYTES + 1))
    assert made.untyped_storage().nbytes() == LARGE_BYTES + 1
    assert reserve.empty(header()).data_ptr() == address


def test_no_more_is_kept_than_the_limit(reserve: Reserve) -> None:
    for index in range(20):
        reserve.empty(header(LARGE_BYTES * 2 + index))
    assert sum(kept.length for kept in reserve._kept) <= MAX_KEPT_BYTES
    reserve.empty(header(MAX_KEPT_BYTES + 1))
    assert reserve._kept == []


def test_small_tensors_are_not_looked_after(reserve: Reserve) -> None:
    reserve.empty(header(LARGE_BYTES - 1))
    assert reserve._kept == []


def test_it_is_given_back_after_a_while_and_at_the_end(reserve: Reserve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_S", 0.2)
    reserve.empty(header())
    assert len(reserve._kept) == 1
    limit = time.monotonic() + 10
    while reserve._kept:
        assert time.monotonic() < limit
        time.sleep(0.05)
    held = reserve.empty(header())
    reserve.close()
    assert reserve._kept == []
    held.fill_(3)
    assert reserve.empty(header()).data_ptr() != held.data_ptr()
    assert reserve._kept == []
