"""What is particular to CUDA: streams beside the computing one, page-locked memory, graphs.

The computing stream is the caller's current one, as for everything in PyTorch. Other streams are ordered with it by
events; the host waits for nothing but the copy that it reads.

Source:
    torch/cuda/graphs.py, aten/src/ATen/cuda/CUDAGraph.cpp, c10/cuda/CUDACachingAllocator.cpp; notes/cuda of PyTorch's
    documentation, sections on streams, memory management and graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from djinn.ir.program import Program
from djinn.kinds.guard import CallCheck
from djinn.wire.tensors import DTYPE_NAMES, is_dense
from djinn_executor_torch.calls import bind
from djinn_executor_torch.executor import TorchExecutor
from djinn_executor_torch.graphs import NotRecordedError, Shelf
from djinn_executor_torch.recorded import RecordedProgram
from djinn_executor_torch.staging import Staging

__all__ = ("CudaExecutor", "CudaLane", "CudaRecorder")

MAX_FAILED_CAPTURES = 16
"""Captures that may fail before no more are tried: what a failed one leaves behind is small, but stays."""
MEMORY_SHARE = 8
"""One part in so many of the device's memory is for recordings."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for every context of the process."""
_log = logging.getLogger("djinn.executor")


class CudaLane:
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Begin to copy bytes."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            passing: torch.cuda.Event = self.stream.record_event()
        return passing


class HostMemory:
    """Makes page-locked memory.

    PyTorch's own way asks whatever accelerator is registered, which with djinn is another; so it is locked here. If the
    system refuses, it is ordinary memory: the driver then stages copies itself, and they are as right.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: set[int] = set()

    def allocate(self, length: int) -> torch.Tensor:
        """Make ``u8[length]``."""
        memory = torch.empty(length, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), length, _PORTABLE))
        if status:
            _log.warning("no page-locked memory (CUDA error %d): copies to and from the device do not overlap", status)
            # The runtime remembers the error for the next launch that looks, which is this one.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)
        else:
            self._locked.add(memory.data_ptr())
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """Unlock it."""
        if memory.data_ptr() in self._locked:
            self._locked.remove(memory.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class CudaTake:
    """A captured graph, with memory of its own for all that it computes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any], size_bytes: int) -> None:
        self.results = results
        self.size_bytes = size_bytes
        self._graph = graph

    def play(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Give its memory back; a launch that is under way ends first."""
        self.results = []
        self._graph.reset()


class CudaRecorder:
    """Records programs as CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.limit_bytes = torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE
        # Private pools of memory are the native allocator's, and graphs of HIP have ways of their own.
        self.is_usable = torch.version.hip is None and torch.cuda.get_allocator_backend() == "native"

    def settings(self) -> tuple[Any, ...]:
        """Describe what kernels depend on beside their arguments."""
        matmul = torch.backends.cuda.matmul
        cudnn: Any = torch.backends.cudnn
        return (
            matmul.fp32_precision, matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision,
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled(),
        )

    def rehearse(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Run on the stream on which graphs are captured.

        Libraries make handles and workspaces for each stream when it is first used, which no capture would survive.
        """
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        try:
            with torch.cuda.stream(self._stream):
                results = run()
        finally:
            computing.wait_stream(self._stream)
        for result in results:
            if isinstance(result, torch.Tensor) and result.is_cuda:
                # Its memory belongs to the other stream, which must not use it again before this one is done with it.
                result.record_stream(computing)
        return results

    def record(self, run: Callable[[], list[Any]]) -> CudaTake:
        """Capture what ``run`` launches.

        Other threads may go on with the device meanwhile, hence ``thread_local``. Python's collector may not: it would
        free what is not to be freed now.

        Raises:
            NotRecordedError: The capture failed, and what it left behind is cleared away.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            results = self._capture(graph, pool, run)
        except Exception as error:  # noqa: BLE001  # becomes the reason why it is not recorded
            # Whatever an operation raises because it cannot be captured is raised again, or not, when it really runs.
            self._clear_away(graph, pool)
            raise NotRecordedError(f"{type(error).__name__}: {error}") from None
        finally:
            if was_collecting:
                gc.enable()
        return CudaTake(graph, results, self._size_of(pool))

    def _capture(self, graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], list[Any]]) -> list[Any]:
        # Random generators keep tensors for graphs, which others use outside of the inference mode.
        with torch.cuda.stream(self._stream), torch.inference_mode(mode=False), torch.no_grad():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with torch.inference_mode():
                    return run()
            finally:
                graph.capture_end()

    def _clear_away(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Undo a capture that failed.

        If the capture itself is invalid, ``capture_end`` raises before it tells the allocator that it is over: that
        would send no memory of several streams back again, and refuse to empty its cache. The allocators may also refer
        to the graph from then on, so it stays.
        """
        index = self._stream.device_index
        try:
            torch._C._cuda_endAllocateToPool(index, pool)
        except RuntimeError:
            # The capture had ended in good order, and what ran in it had failed.
            graph.reset()
            return
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)
        self._failed.append(graph)
        if len(self._failed) >= MAX_FAILED_CAPTURES or not self._still_captures():
            self.is_usable = False
            _log.warning("programs are no longer recorded as CUDA graphs: %d captures failed", len(self._failed))

    def _still_captures(self) -> bool:
        """Try the least capture that there is; one that succeeds also ends what generators take for one under way."""
        probe = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream), torch.inference_mode(mode=False), torch.no_grad():
                cell = torch.zeros(1, device=self._device)
                probe.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
                try:
                    cell.add_(1)
                finally:
                    probe.capture_end()
        except RuntimeError:
            self._failed.append(probe)
            return False
        probe.reset()
        return True

    @staticmethod
    def _size_of(pool: Any) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


class CudaExecutor(TorchExecutor):
    """Runs programs on a CUDA device.

    Uploads and downloads have a stream and page-locked memory each, so they overlap with computing and with each other.
    Programs that repeat are recorded as CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up, self._down = CudaLane(device), CudaLane(device)
        host = HostMemory(device)
        self._uploads = Staging(self._up, host.allocate, host.release)
        self._downloads = Staging(self._down, host.allocate, host.release)
        self._shelf = Shelf(CudaRecorder(device))

    def stats(self) -> dict[str, int]:
        """Count what recordings were made, played and given up."""
        return self._shelf.stats()

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> RecordedProgram:
        """Resolve every operator, and ask before calls; see `djinn_lib_service.abilities.CheckingExecutor`."""
        return RecordedProgram(program, bind(program, self._device, checks), self._lock, self._device, self._shelf,
                               relieve=self.relieve)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device; its last pieces may still be on their way when this returns."""
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = tensor.detach()
            if not _travels_as_bytes(tensor):
                return tensor.to(self._device, copy=True)
            computing = torch.cuda.current_stream(self._device)
            # Allocated for the stream that writes it first: then nothing that is being computed can still use it.
            with torch.cuda.stream(self._up.stream):
                made = _empty(tensor, self._device)
            passing = self._uploads.send(_bytes_of(tensor), _bytes_of(made))
            if isinstance(passing, torch.cuda.Event):
                computing.wait_event(passing)
            made.record_stream(computing)
            return made

    def get(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to a new dense CPU tensor; waits for what the value needs, and not for what comes after it."""
        with torch.inference_mode(mode=False), torch.no_grad():
            value = value.detach()
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if not is_dense(tuple(value.size()), value.stride()):
                value = value.clone()
            if not value.is_cuda or not _travels_as_bytes(value):
                return super().get(value)
            made = _empty(value, torch.device("cpu"))
            # The value cannot be freed meanwhile: it is held here until its bytes have arrived.
            self._down.stream.wait_stream(torch.cuda.current_stream(self._device))
            self._downloads.fetch(_bytes_of(value), _bytes_of(made))
            return made

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a CPU tensor that nobody else holds on the device; see `djinn_lib_service.abilities.SharingExecutor`."""
        return self.put(tensor)

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Give a CPU tensor to be read at once; see `djinn_lib_service.abilities.SharingExecutor`."""
        return self.get(value)

    def close(self) -> None:
        """Give recordings and page-locked memory back; values belong to sessions."""
        with self._lock:
            self._shelf.close()
        self._uploads.close()
        self._downloads.close()


def _travels_as_bytes(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and tensor.dtype in DTYPE_NAMES and tensor.numel() > 0
        and not tensor.is_conj() and not tensor.is_neg() and is_dense(tuple(tensor.size()), tensor.stride())
    )


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    # PyTorch warns whenever memory is allocated as complex32, which is the user's business where it is computed.
    allocated = torch.int32 if like.dtype == torch.complex32 else like.dtype
    made = torch.empty_strided(like.size(), like.stride(), dtype=allocated, device=device)
    return made if allocated == like.dtype else made.view(like.dtype).data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """See a dense tensor's elements as ``u8[N]``, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
