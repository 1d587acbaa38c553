"""Failures keep the class that PyTorch gives them, and a lack of memory is recognised wherever it is found."""

from __future__ import annotations

import pytest
import torch

from djinn import errors
from djinn.wire.failures import to_exception
from djinn.wire.messages import Failure
from djinn_plugins.common.failures import is_out_of_memory, name_of

KEPT = (torch.OutOfMemoryError("CUDA out of memory."), torch.AcceleratorError("CUDA error: an assert"),
        errors.OutOfMemoryError("no room"), IndexError("out of range"))
LACKING = (
    "CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling ...",
    "cuFFT error: CUFFT_ALLOC_FAILED", "CURAND_STATUS_ALLOCATION_FAILED",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
)


@pytest.mark.parametrize("error", KEPT, ids=str)
def test_the_client_raises_the_class_that_was_raised_there(error: Exception) -> None:
    again = to_exception(Failure(1, name_of(error), str(error)))
    assert type(again) is type(error)


def test_a_class_that_is_not_known_becomes_the_nearest_one_that_is() -> None:
    class OwnError(torch.OutOfMemoryError):
        pass

    assert name_of(OwnError()) == name_of(torch.OutOfMemoryError())
    assert name_of(Exception()) == "RuntimeError"


@pytest.mark.parametrize("text", LACKING)
def test_a_lack_of_memory_is_recognised(text: str) -> None:
    assert is_out_of_memory(torch.AcceleratorError(text))
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


@pytest.mark.parametrize("text", ["CUDA error: device-side assert triggered",
                                  "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"])
def test_other_failures_of_a_device_are_none(text: str) -> None:
    assert not is_out_of_memory(torch.AcceleratorError(text))


def test_what_pytorch_raises_is_recognised_whatever_it_says() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError())
