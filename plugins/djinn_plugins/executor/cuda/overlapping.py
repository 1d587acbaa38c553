"""CUDA specifics: additional streams, page-locked memory, graphs.

The computing stream is the caller's current one, as everywhere in PyTorch. Events order the other streams with it; the
host waits only for the copy that it reads.

Source:
    torch/cuda/graphs.py, aten/src/ATen/cuda/CUDAGraph.cpp, c10/cuda/CUDACachingAllocator.cpp; notes/cuda of PyTorch's
    documentation, sections on streams, memory management and graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from djinn.ir.program import Program
from djinn.wire.tensors import DTYPE_NAMES, is_dense
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.common.failures import with_relief
from djinn_plugins.common.kinds.guard import CallCheck
from djinn_plugins.executor.cuda.cuda_graphs import NotRecordedError, Shelf
from djinn_plugins.executor.cuda.executor import CudaExecutor
from djinn_plugins.executor.cuda.recorded import RecordedProgram
from djinn_plugins.executor.cuda.settings import CudaSettings
from djinn_plugins.executor.cuda.staging import Staging
from djinn_plugins.executor.torch.executor import TorchProgram

__all__ = ("CudaLane", "CudaRecorder", "OverlappingCudaExecutor")

MAX_FAILED_CAPTURES = 16
"""Number of failed captures after which no more are tried: a failed one leaves a small leak behind."""
MEMORY_SHARE = 8
"""Recordings may use one part in this many of the device's memory."""
_DEFAULTS = CudaSettings()
_PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for every context of the process."""
_log = logging.getLogger("djinn.executor")


class CudaLane:
    """Copies on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Start copying bytes."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            passing: torch.cuda.Event = self.stream.record_event()
        return passing


class HostMemory:
    """Allocates page-locked memory.

    PyTorch's own function asks the registered accelerator, which is another one with djinn; so the memory is locked
    here. If the system refuses, it remains ordinary memory: copies are still correct, and the driver stages them
    itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: set[int] = set()

    def allocate(self, length: int) -> torch.Tensor:
        """Allocate ``u8[length]``."""
        memory = torch.empty(length, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), length, _PORTABLE))
        if status:
            _log.warning("no page-locked memory (CUDA error %d): copies to and from the device do not overlap", status)
            # The runtime reports the error to the next launch that checks, which is this one.
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
    """A captured graph. Its intermediate values and results lie in the pool of all graphs."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, results: list[Any], size_bytes: int, takes: WeakSet[CudaTake]
    ) -> None:
        self.results = results
        self.size_bytes = size_bytes
        self._graph = graph
        self._takes = takes
        takes.add(self)

    def play(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Release its memory; a launch in progress finishes first."""
        self.results = []
        self._graph.reset()
        self._takes.discard(self)


class CudaRecorder:
    """Records programs as CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []
        self._takes: WeakSet[CudaTake] = WeakSet()
        self._pool: Any = None
        self.limit_bytes = torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE
        # Only the native allocator has private pools, and HIP's graphs behave differently.
        self.is_usable = torch.version.hip is None and torch.cuda.get_allocator_backend() == "native"

    def settings(self) -> tuple[Any, ...]:
        """Return the settings that kernels depend on besides their arguments."""
        matmul = torch.backends.cuda.matmul
        cudnn: Any = torch.backends.cudnn
        return (
            matmul.fp32_precision, matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision,
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled(),
        )

    def rehearse(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Run on the stream on which graphs are captured.

        On first use of a stream, libraries create handles and workspaces for it, which would make a capture fail.
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
                # Its memory belongs to the other stream, which must not reuse it before this one has finished with it.
                result.record_stream(computing)
        return results

    def record(self, run: Callable[[], list[Any]]) -> CudaTake:
        """Capture the launches of ``run``.

        Other threads may use the device meanwhile, hence ``thread_local``. Python's garbage collector is disabled,
        because it could free memory during the capture.

        Raises:
            NotRecordedError: The capture failed, and its remains were removed.
        """
        graph = torch.cuda.CUDAGraph()
        if not self._takes:
            # The allocator frees a pool that no graph uses, and accepts its name no more.
            self._pool = torch.cuda.graph_pool_handle()
        pool = self._pool
        before = self._size_of(pool)
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            results = self._capture(graph, pool, run)
        except Exception as error:  # noqa: BLE001  # becomes the reason for the refusal
            # If this is a real error and not one of capturing, the actual run raises it again.
            self._clear_away(graph, pool)
            raise NotRecordedError(f"{type(error).__name__}: {error}") from None
        finally:
            if was_collecting:
                gc.enable()
        return CudaTake(graph, results, max(0, self._size_of(pool) - before), self._takes)

    def _capture(self, graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], list[Any]]) -> list[Any]:
        # Random generators keep tensors for graphs, which are also used outside of inference mode.
        with torch.cuda.stream(self._stream), torch.inference_mode(mode=False), torch.no_grad():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with torch.inference_mode():
                    return run()
            finally:
                graph.capture_end()

    def _clear_away(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Undo a failed capture.

        If the capture itself is invalid, ``capture_end`` raises before it informs the allocator: the allocator would
        then not reuse memory of several streams, and refuse to empty its cache. The allocators may also still refer to
        the graph, so it is kept.
        """
        index = self._stream.device_index
        try:
            torch._C._cuda_endAllocateToPool(index, pool)
        except RuntimeError:
            # The capture ended normally, and the captured code failed.
            graph.reset()
            return
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)
        self._failed.append(graph)
        if len(self._failed) >= MAX_FAILED_CAPTURES or not self._still_captures():
            self.is_usable = False
            _log.warning("programs are no longer recorded as CUDA graphs: %d captures failed", len(self._failed))

    def _still_captures(self) -> bool:
        """Try a minimal capture; if it succeeds, it also resets generators that assume a capture in progress."""
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


class OverlappingCudaExecutor(CudaExecutor):
    """Runs programs on a CUDA device while it copies.

    Uploads and downloads each have their own stream and page-locked memory, so they overlap with computing and with
    each other. Programs that repeat are recorded as CUDA graphs.
    """

    def __init__(self, device: torch.device, settings: CudaSettings = _DEFAULTS) -> None:
        super().__init__(device, settings)
        self._up, self._down = CudaLane(device), CudaLane(device)
        host = HostMemory(device)
        length = settings.cuda_staging_bytes
        self._uploads = Staging(self._up, host.allocate, host.release, length=length)
        self._downloads = Staging(self._down, host.allocate, host.release, length=length)
        self._shelf = Shelf(CudaRecorder(device))
        self._graph_mode = settings.cuda_graphs

    def stats(self) -> dict[str, int]:
        """Return the numbers of recordings that were made, played and given up."""
        return self._shelf.stats()

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> TorchProgram:
        """Resolve every operator, and check calls; see `djinn_plugins.common.kinds.executor.SupportsCheckedCompile`."""
        if self._graph_mode == "off":
            return super().compile_checked(program, checks)
        return RecordedProgram(program, bind(program, self._device, checks), self._lock, self._device, self._shelf,
                               relieve=self.relieve, in_segments=self._graph_mode == "piecewise")

    def relieve(self) -> bool:
        """Free memory: that of recordings, which nothing else can use, and what the callback frees."""
        with self._lock:
            had_some = self._shelf.close()
        return super().relieve() or had_some

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device; its last pieces may still be in transfer when this returns."""
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = tensor.detach()
            if not _travels_as_bytes(tensor):
                return tensor.to(self._device, copy=True)
            computing = torch.cuda.current_stream(self._device)
            # Allocated for the stream that writes it first, so that no pending computation can still use the memory.
            with torch.cuda.stream(self._up.stream):
                made = with_relief(partial(_empty, tensor, self._device), self.relieve)
            passing = self._uploads.send(_bytes_of(tensor), _bytes_of(made))
            if isinstance(passing, torch.cuda.Event):
                computing.wait_event(passing)
            made.record_stream(computing)
            return made

    def get(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to a new dense CPU tensor; waits for the value's own computation, and not for later work."""
        with torch.inference_mode(mode=False), torch.no_grad():
            value = value.detach()
            if value.is_conj() or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if not is_dense(tuple(value.size()), value.stride()):
                value = value.clone()
            if not value.is_cuda or not _travels_as_bytes(value):
                return super().get(value)
            made = _empty(value, torch.device("cpu"))
            # This reference keeps the value alive until its bytes have arrived.
            self._down.stream.wait_stream(torch.cuda.current_stream(self._device))
            self._downloads.fetch(_bytes_of(value), _bytes_of(made))
            return made

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a CPU tensor without another owner there; see `djinn_plugins.common.kinds.executor.SupportsSharing`."""
        return self.put(tensor)

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor for immediate reading; see `djinn_plugins.common.kinds.executor.SupportsSharing`."""
        return self.get(value)

    def close(self) -> None:
        """Release recordings and page-locked memory; values belong to sessions."""
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
    # PyTorch warns about every complex32 allocation; such a warning belongs to the user's own computation.
    allocated = torch.int32 if like.dtype == torch.complex32 else like.dtype
    made = torch.empty_strided(like.size(), like.stride(), dtype=allocated, device=device)
    return made if allocated == like.dtype else made.view(like.dtype).data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's elements as ``u8[N]``, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
