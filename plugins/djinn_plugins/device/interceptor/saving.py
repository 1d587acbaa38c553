"""Storages of remote tensors: sharing, size and content; also loading files to the device.

A storage of a remote tensor has a number in this process. Its address is an integer beyond 64 bits, which exists on no
machine: it identifies storages, which is needed for saving models, and cannot be dereferenced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, Self

import torch

from djinn.errors import UnsupportedTensorError
from djinn.ir.spec import TensorSpec
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn.wire.tensors import is_dense
from djinn_plugins.common.once import once
from djinn_plugins.device.interceptor import storage_references, stored_storages
from djinn_plugins.device.interceptor.resizing import has_no_bytes, reach_bytes, resized
from djinn_plugins.device.interceptor.subclasses import ordinary_class

_without_functions = torch._C.DisableTorchFunctionSubclass
_PRIORITY = 15
"""After ordinary CPU storages, before PyTorch's default for the device."""
_PROTOCOL = 4
_KEPT = frozenset("cuda is_cuda is_hpu is_shared is_sparse is_sparse_csr _fix_weakref".split())


class RemoteStorage(torch.UntypedStorage):
    """Bytes that an executor holds.

    Attributes:
        tensor: A tensor in this storage.
        copies: Tensors in it that a deep copy has made, if it is one.
    """

    tensor: LazyTensor
    copies: list[Any]

    @classmethod
    def of(cls, tensor: LazyTensor) -> Self:
        """Create the storage object of a tensor."""
        # It contains a storage of the meta device, which PyTorch assigns to no tensor of another device.
        made = cls(0, device="meta")
        made.tensor, made.copies = tensor, []
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute there
        """Logical device."""
        return self.tensor.device

    @property
    def _cdata(self) -> int:
        # ``torch.save`` writes only one of those with equal numbers, so they must have the same bytes.
        return (self.tensor._value.slot.storage << 64) + self.nbytes()

    def __eq__(self, other: object) -> bool:
        # PyTorch has one object for each storage.
        return isinstance(other, RemoteStorage) and other.data_ptr() == self.data_ptr() and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.tensor._value.slot.storage)

    def _weak_ref(self) -> int:  # type: ignore[override]  # an address there
        return storage_references.reference(self.tensor)

    def data_ptr(self) -> int:
        """Return the number that represents the storage's address; 0 if it is empty."""
        return self.tensor._value.slot.storage << 64 if self.nbytes() else 0

    def nbytes(self) -> int:
        """Return the number of bytes; bytes that no living tensor covers may be missing."""
        spec = self._reaching()._value.spec
        return 0 if has_no_bytes(self.tensor) else reach_bytes(
            spec.size, spec.stride, spec.storage_offset, spec.dtype.itemsize)

    def _reaching(self) -> LazyTensor:
        """Return the tensor that reaches farthest here, and is neither conjugated nor negated if there is one."""
        with _without_functions():
            base = self.tensor._base
        return base if isinstance(base, LazyTensor) else self.tensor

    def size(self) -> int:
        """Return the number of bytes."""
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def elements(self, dtype: torch.dtype) -> LazyTensor:
        """View the whole storage as ``dtype[N]``."""
        with _without_functions(), torch.no_grad():
            held: Any = self._reaching().detach()
            whole = held.as_strided((self.nbytes() // held.dtype.itemsize,), (1,), 0)
            if whole.dtype != dtype:
                count = self.nbytes() // dtype.itemsize * dtype.itemsize
                whole = whole.view(torch.uint8)[:count].view(dtype)
        return whole  # type: ignore[no-any-return]  # a LazyTensor, but PyTorch says Tensor

    def cpu(self) -> torch.UntypedStorage:
        """Download the bytes."""
        return self.whole().materialize().untyped_storage()

    def whole(self) -> LazyTensor:
        """Return a tensor that is all of the storage, in the order of its bytes."""
        # The tensor itself, if it is all of the storage: it may be at home already.
        return self.tensor if self.is_tensor() else self.elements(torch.uint8)

    def is_tensor(self) -> bool:
        """Whether the elements of ``tensor``, in any order, are all bytes."""
        spec = self.tensor._value.spec
        return (spec.size_bytes == self.nbytes() and is_dense(tuple(spec.size), spec.stride)
                and not spec.dtype.is_complex)

    def clone(self) -> Self:
        """Copy the bytes, on the device."""
        return self.of(self.elements(torch.uint8).clone())  # type: ignore[arg-type]  # lazy, as what it copies

    def copied(self, copies: dict[Any, Any]) -> Self:
        """Copy the bytes, on the device, unless ``copies`` has a copy of them."""
        number = self.tensor._value.slot.storage
        known: Self | None = copies.get(number)
        if known is None or known.nbytes() < self.nbytes():
            whole = self.whole()
            with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
                made = copies[number] = self.of(whole.clone())  # type: ignore[arg-type]  # lazy, as what it copies
            if known is not None:
                # The first tensors needed less of it, and nothing said that there was more.
                made.copies, known.tensor = known.copies, made.tensor
                for earlier in known.copies:
                    earlier.data = made.within(earlier._value.spec)
        return copies[number]  # type: ignore[no-any-return]  # of such

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        return self.copied(memo.setdefault("torch", {}))

    def within(self, spec: TensorSpec) -> LazyTensor:
        """Return a tensor in this storage that autograd does not know as a view, as ``set_`` makes it."""
        whole = self.elements(spec.dtype)
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            made: Any = whole.as_strided(spec.size, spec.stride, spec.storage_offset)
        return made  # type: ignore[no-any-return]  # lazy

    def to(self, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        """Download the bytes, or leave them on the device."""
        kind = torch.device(device).type
        return self if kind == self.device.type else self.cpu() if kind == "cpu" else self._refuse()

    def tolist(self) -> list[int]:
        """Download the bytes as integers."""
        return self.cpu().tolist()  # type: ignore[no-any-return]  # untyped there

    def _set_from_file(self, *args: Any) -> Self:
        """Fill it from a file in the format of older PyTorch releases."""
        local = torch.UntypedStorage(self.nbytes())
        local._set_from_file(*args)
        self.elements(torch.uint8).copy_(_bytes_of(local))
        return self

    def _write_file(self, *args: Any) -> None:
        self.cpu()._write_file(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.cpu(),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self.device}, size={self.nbytes()})"

    __str__ = __repr__

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedTensorError("The memory of a remote tensor is not in this process.",
                                     hint="Use tensor.cpu() to bring its data home.")

    def resize_(self, size: int) -> Self:
        """Free the memory of all tensors here, with 0 bytes, or allocate it again, as on the CPU.

        Raises:
            UnsupportedTensorError: Some bytes would be left, but fewer than the tensors have.
        """
        self.tensor = resized(self.tensor, self.nbytes(), size)
        return self

    __getitem__ = __setitem__ = __iter__ = _refuse


for _name in dir(torch.UntypedStorage):
    if not _name.startswith("__") and _name not in vars(RemoteStorage) and _name not in _KEPT:
        setattr(RemoteStorage, _name, RemoteStorage._refuse)


class _ConjugatedStorages:
    """Storages of which a view was conjugated or negated. Views of such a view have no mark."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._limit = _FEW_STORAGES

    def add(self, tensor: LazyTensor) -> None:
        """Note that a conjugated or negated view of a tensor is made."""
        self._numbers.add(storage_references.number_of(tensor))
        if len(self._numbers) > self._limit:
            # Rarely, since it takes long.
            self._numbers &= storage_references.living()
            self._limit = max(_FEW_STORAGES, 2 * len(self._numbers))

    def __contains__(self, tensor: LazyTensor) -> bool:
        """Whether a tensor may have other values than the elements of its storage."""
        return storage_references.number_of(tensor) in self._numbers


_FEW_STORAGES = 4096
conjugated_storages = _ConjugatedStorages()


def may_have_other_values(tensor: LazyTensor) -> bool:
    """Whether a tensor may have other values than its storage: those of a conjugated or negated view."""
    slot = tensor._value.slot
    return tensor.is_conj() or tensor.is_neg() or (slot.number != slot.storage and tensor in conjugated_storages)


def untyped_storage(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``Tensor.untyped_storage``."""
    return RemoteStorage.of(args[0])


def storage(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``Tensor.storage``, which is deprecated."""
    torch.storage._warn_typed_storage_removal(stacklevel=5)
    return _typed(args[0])


def _typed(tensor: LazyTensor) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=RemoteStorage.of(tensor), dtype=tensor.dtype, _internal=True)


def reduce(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``Tensor.__reduce_ex__``: it saves ordinary CPU tensors with the same sharing of storages."""
    tensor, protocol = args
    with _without_functions():
        needs_gradient = tensor.requires_grad
    hooks: OrderedDict[int, Any] = OrderedDict()
    state = {name: value for name, value in vars(tensor).items() if name not in storage_references.OWN_ATTRIBUTES}
    if getattr(tensor, "_is_param", False):
        held = (tensor.data, needs_gradient, hooks)
        if state:
            return torch._utils._rebuild_parameter_with_state, (*held, state)
        return torch._utils._rebuild_parameter, held
    torch.utils.hooks.warn_if_has_hooks(tensor)
    if tensor.dtype.is_complex or tensor.dtype in torch.storage._new_dtypes() or may_have_other_values(tensor):
        # Bytes do not show conjugation, and new dtypes have no typed storages.
        rebuild, parts = tensor.materialize().requires_grad_(needs_gradient).__reduce_ex__(protocol)
    else:
        spec = tensor._value.spec
        rebuild = torch._utils._rebuild_tensor_v2
        parts = (_typed(tensor), spec.storage_offset, tuple(spec.size), tuple(spec.stride), needs_gradient, hooks)
    ordinary = ordinary_class(type(tensor))
    if state or ordinary:
        return torch._tensor._rebuild_from_type_v2, (rebuild, ordinary or torch.Tensor, parts, state)
    return rebuild, parts


def _itself(item: Any) -> Any:
    return item


def _for_process(tensor: LazyTensor) -> Any:
    """Say how a tensor goes to another process: in a message, as a copy.

    Raises:
        UnsupportedTensorError: It is an argument of a process that starts, with which eager would share it.
    """
    if get_spawning_popen() is not None:
        cannot_be_shared(None, (tensor,), {})
    return tensor.__reduce_ex__(_PROTOCOL)


def cannot_be_shared(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Handle ``Tensor.share_memory_``.

    Raises:
        UnsupportedTensorError: Always.
    """
    raise UnsupportedTensorError("Processes cannot share a remote tensor: each has values of its own on the server.",
                                 hint="Share tensors on the CPU, and move them in each process; or use threads.")


def set_storage(session: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor use a storage.

    Raises:
        RuntimeError: The storage is of another device, as in eager.
    """
    target, storage, *place = args
    if not isinstance(target, LazyTensor) or not isinstance(storage, RemoteStorage):
        raise RuntimeError(  # noqa: TRY004  # as eager
            f'Attempted to set the storage of a tensor on device "{target.device}" to a storage on different device '
            f'"{storage.device}".  This is no longer allowed; the devices must match.')
    elements = storage.elements(target.dtype)
    names = ("storage_offset", "size", "stride")
    given = {**dict(zip(names, place, strict=False)), **kwargs} or {"storage_offset": 0, "size": (len(elements),)}
    stride = given.get("stride") or _contiguous(given["size"])
    return torch.ops.aten.set_.source_Tensor_storage_offset(
        target, elements, given["storage_offset"], given["size"], stride)


def _contiguous(size: Any) -> list[int]:
    strides = [1]
    for extent in reversed(size[1:]):
        strides.insert(0, strides[0] * max(extent, 1))
    return strides[: len(size)]


def _new_storage(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Create an ``UntypedStorage``; one of this device holds as many zeros, or the given bytes."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != devices.logical_device().type:
        return torch._C.StorageBase.__new__(cls, *args, **kwargs)
    content = args[0] if args else kwargs.get("size", 0)
    where = devices.checked_device(torch.device(device))
    made = (torch.zeros(content, dtype=torch.uint8, device=where) if isinstance(content, int)
            else torch.tensor(content, dtype=torch.uint8, device=where))
    return RemoteStorage.of(made)  # type: ignore[arg-type]  # lazy, on this device


def _wrapping(original: Any) -> Any:
    def new_wrapped_storage(self: Any, storage: Any) -> Any:
        """As the original, which refuses subclasses of ``UntypedStorage``."""
        if isinstance(storage, RemoteStorage):
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=self._dtype, _internal=True)
        return original(self, storage)

    return new_wrapped_storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def uploaded(storage: torch.UntypedStorage, device: torch.device) -> RemoteStorage:
    """Upload a storage."""
    return RemoteStorage.of(runtime.current().upload(_bytes_of(storage), device))


def brought_home(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """Download tensors at once, with what they share of storages and their need for gradients."""
    storages: dict[int, RemoteStorage] = {}
    for tensor in tensors:
        held = RemoteStorage.of(tensor)
        known = storages.setdefault(tensor._value.slot.storage, held)
        if held.nbytes() > known.nbytes():
            storages[tensor._value.slot.storage] = held
    fetched = runtime.current().materialize([storage.whole() for storage in storages.values()])
    local = dict(zip(storages, (bytes_.untyped_storage() for bytes_ in fetched), strict=True))
    made = []
    for tensor in tensors:
        spec = tensor._value.spec
        alike = torch.empty(0, dtype=spec.dtype).set_(
            local[tensor._value.slot.storage], spec.storage_offset, spec.size, spec.stride)
        made.append(alike.requires_grad_(tensor.requires_grad))
    return made


def _load(storage: Any, location: str) -> Any:
    """Move a storage that ``torch.load`` or ``torch.package`` has read to the device, if that is its target."""
    device = devices.logical_device()
    if location.partition(":")[0] != device.type:
        return None
    if location not in (device.type, str(device)):
        raise RuntimeError(f"Attempting to deserialize object on {location}, but there is 1 remote accelerator, "
                           f"{device}. Use torch.load with map_location to map your storages to an existing device.")
    if isinstance(storage, torch.storage.TypedStorage):
        return torch.storage.TypedStorage(
            wrap_storage=_load(storage._untyped_storage, location), dtype=storage.dtype, _internal=True)
    if getattr(storage, "_torch_load_uninitialized", False):
        return RemoteStorage.of(torch.empty(storage.nbytes(), dtype=torch.uint8, device=device))  # type: ignore[arg-type]  # lazy, on this device
    stored: Any = stored_storages.find(storage)
    return RemoteStorage.of(runtime.current().upload(_bytes_of(storage)) if stored is None else stored)


def _tag(storage: Any) -> str | None:
    return "cpu" if isinstance(storage, RemoteStorage) else None


@once
def register() -> None:
    """Let ``torch.save`` write the same as for CPU tensors, ``torch.load`` map to the device, processes get copies."""
    torch.serialization.register_package(_PRIORITY, _tag, _load)
    ForkingPickler.register(LazyTensor, _for_process)


def guard_constructors() -> None:
    """Make the constructors of storages work for this device: PyTorch's own would use a missing allocator unchecked."""
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign]  # it has no such method of its own
    typed: Any = torch.storage.TypedStorage
    typed._new_wrapped_storage = _wrapping(typed._new_wrapped_storage)
