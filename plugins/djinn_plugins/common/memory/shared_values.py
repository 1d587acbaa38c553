"""Device memory that values of several sessions share until one of them is written.

Each value has a separate storage, and PyTorch's copy-on-write storages lie in the same memory. Memory on the host is
shared by the system, page by page (see `djinn_plugins.common.memory.kept_memory`); this is for devices, and for systems
without files in memory.

Source:
    c10/core/impl/COW.cpp: a storage gets its own copy when an operator asks for memory to write; the last one keeps the
    memory. PyTorch's own tests check that operators ask for no more than they write (``test_cow_input``).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_plugins.common.memory.tensor_bytes import placed_in

__all__ = ("SharedValue", "is_shared", "unshare")

_torch: Any = torch._C  # its declarations lack this
_is_cow = _torch._is_cow_tensor
_lock = threading.Lock()
_is_used = threading.Event()


class SharedValue:
    """A content that values on a device share until they are written.

    It holds no memory: when the last value is gone, the memory is free.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []
        self._form: torch.Tensor | None = None

    def value(self, device: torch.device) -> torch.Tensor | None:
        """Return a new value in the memory of an equal, unwritten one; ``None`` if there is none."""
        with _lock:
            return self._another(device)

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a value with the content of a new tensor, which the caller gives up.

        Returns:
            A tensor whose memory may be shared, now or later, or the tensor itself if that cannot be.
        """
        whole_bytes = tensor.numel() * tensor.element_size()
        if tensor.untyped_storage().nbytes() != whole_bytes or tensor.dtype is torch.complex32:
            return tensor
        with _lock:
            found = self._another(tensor.device)
            if found is not None:
                return found
            self._form = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            try:
                return self._clone(tensor)
            except RuntimeError:
                # Its memory is none of PyTorch's allocator.
                return tensor

    def _another(self, device: torch.device) -> torch.Tensor | None:
        while self._storages:
            # The C++ object lives as long as the weak reference, its memory does not.
            storage = torch.UntypedStorage._new_with_weak_ptr(self._storages[-1].cdata)
            if storage is not None:
                assert self._form is not None
                with torch.inference_mode(mode=False), torch.no_grad():
                    tensor = placed_in(storage, self._form)
                if _is_cow(tensor):
                    return self._clone(tensor) if tensor.device == device else None
            # It is gone, or has been written.
            self._storages.pop()
        return None

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(mode=False), torch.no_grad():
            made = torch._lazy_clone(tensor.detach())
        _is_used.set()
        self._storages = [other for other in self._storages if not other.expired()]
        self._storages.append(StorageWeakRef(made.untyped_storage()))
        return made


def is_shared(value: torch.Tensor) -> bool:
    """Whether a value lies in memory that is copied before it is written."""
    return _is_used.is_set() and bool(_is_cow(value))


def unshare(value: object) -> None:
    """Copy the memory of a value that is about to be written, if others share it, on the current stream.

    PyTorch does the same when an operator writes. It is done before, so that a copy is ordered with the operators of
    all streams and is not part of a CUDA graph, and so that no other value is made of this one in between.
    """
    if not (_is_used.is_set() and isinstance(value, torch.Tensor)):
        return
    with _lock:
        if _is_cow(value):
            # Memory is allocated on the current device.
            with torch.cuda.device_of(value):
                value.untyped_storage().data_ptr()
