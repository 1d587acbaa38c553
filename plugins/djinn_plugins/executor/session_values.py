"""How the values of a session are added, read and dropped by commands other than runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from djinn.errors import LimitError, ProtocolError, UnknownHandleError
from djinn.wire import messages
from djinn.wire.messages import GENERATOR_HANDLE, Copy, Item, Plain, Poisoned, Upload, UploadByDigest
from djinn.wire.tensors import header_of
from djinn_plugins.common.device_report import REPORT_HANDLES
from djinn_plugins.common.kinds.executor import Executor, RandomState, SpareRoom, SupportsSharing
from djinn_plugins.common.kinds.memory import SessionMemory
from djinn_plugins.common.memory.kept_memory import is_mapped
from djinn_plugins.common.memory.tensor_bytes import copy_of, metadata_of, placed_in
from djinn_plugins.executor.content_store import Contents
from djinn_plugins.executor.device_answers import DeviceReports
from djinn_plugins.executor.reports import Failures
from djinn_plugins.executor.turns import Allowance, Turns

__all__ = ("SessionValues",)


class SessionValues:
    """The values of a session. A value that cannot be made is poisoned, and its failure is recorded.

    Args:
        executor: Holds the values.
        memory: Counts and limits what they use.
        random: The session's random numbers, which can be uploaded and fetched like a value.
        failures: Records failures.
        travels: Whether tensors come from and go to another process; see
        `djinn_plugins.executor.service.SessionService`. contents: Keeps uploads, if they should be kept.
        allowance: Limits the number of values; ``None`` for no limit.
        spare: Knows values that lie in spare room; ``None`` if there are none.
        about_to_read: Called with each value before a command other than a run uses it.
        turns: Knows how busy the device is; ``None`` if no other session uses it.

    Attributes:
        adopt: Copies a tensor to the device, or takes it over; it may then be written as a value.
        read: Returns a CPU tensor with a value's content.

    Concurrency:
        One thread at a time, which holds the memory's lock; `fetch` and `describe` take the lock themselves.
    """

    def __init__(self, executor: Executor, memory: SessionMemory, random: RandomState, failures: Failures, *,
                 travels: bool = False, contents: Contents | None = None, allowance: Allowance | None = None,
                 spare: SpareRoom | None = None, about_to_read: Callable[[Any], None] = lambda _: None,
                 turns: Turns | None = None) -> None:
        self._about_to_read = about_to_read
        self._memory = memory
        self._spare = spare
        self._table = memory.values
        self._random = random
        self._failures = failures
        self._contents = contents
        self._allowance = allowance
        self._not_admitted: Poisoned | None = None
        self._reports = DeviceReports(executor, memory.values, turns)
        shared = executor if travels and memory.can_share and isinstance(executor, SupportsSharing) else None
        self._shares = shared is not None and contents is not None
        self._device = torch.device(executor.device)
        # Nothing may write to kept contents, so the value is a copy, unless the system copies pages that are written.
        # Values on a device are copied before they are written.
        self._put = memory.with_room_to_put(executor.put if shared is None or contents is not None else shared.adopt)
        self.adopt = memory.with_room_to_put(executor.put if shared is None else shared.adopt)
        self.read = executor.get if shared is None else shared.lend

    def value(self, handle: int) -> Any:
        """Return a value as eager lays it out; poison if there is none."""
        value = self.given(handle)
        self._about_to_read(value)
        if self._spare is not None and self._spare.make_dense(value):
            self._table.put(handle, value)
        return value

    def given(self, handle: int) -> Any:
        """Return a value as it lies in memory; poison if there is none."""
        try:
            return self._table[handle]
        except KeyError:
            return self._not_admitted or self._failures.add(
                UnknownHandleError(f"The executor holds no value {handle} for this session."))

    def admits(self, handles: Sequence[int]) -> bool:
        """Whether values may be added. If not, they are not even stored as poisoned, which would use memory too."""
        admitted = self.admitted(handles)
        self.free(handles[:admitted] if admitted < len(handles) else ())
        return admitted == len(handles)

    def admitted(self, handles: Sequence[int]) -> int:
        """Return how many of some values, from the first, may be added; the others are dropped as by `admits`."""
        if self._allowance is None:
            return len(handles)
        try:
            self._allowance.admit_values(len(self._table), len(handles))
        except LimitError as error:
            self._not_admitted = self._failures.add(error)
        else:
            return len(handles)
        count = max(0, self._allowance.most_values() - len(self._table))
        try:
            self._allowance.admit_values(len(self._table), count)
        except LimitError:  # another session was faster
            count = 0
        self.free(handles[count:])
        return count

    def free(self, handles: Sequence[int]) -> None:
        """Drop values."""
        self._memory.dropping(handles)
        self._table.drop(handles)
        if self._contents is not None:
            self._contents.release(handles)

    def upload(self, command: Upload, tensor: torch.Tensor) -> None:
        """Add an uploaded value."""
        handle = command.handle
        if handle == GENERATOR_HANDLE:
            self._failures.attempt(lambda: self._random.set(tensor))
            return
        self._memory.dropping((handle,))
        if self.admits((handle,)):
            if self._contents is not None and self._shares:
                self._contents.keep(handle, tensor)
            self._put_kept(handle, tensor)
            if self._contents is not None and not self._shares:
                # After the value has its room: kept uploads count against the host's.
                self._contents.keep(handle, tensor)
            self._memory.uploaded(handle)

    def _put_kept(self, handle: int, tensor: torch.Tensor) -> None:
        """Add a value with the content of an upload, in memory of the kept upload or of equal values if possible."""
        contents = self._contents if self._shares else None
        equal = None if contents is None else contents.value(handle)
        value = None if equal is None else equal.value(self._device)
        if value is None:
            mapped = None if contents is None else contents.shared(handle)
            value = self._failures.attempt(lambda: self._put(tensor) if mapped is None else self.adopt(mapped))
            if equal is not None and isinstance(value, torch.Tensor) and not is_mapped(value):
                value = equal.share(value)
        self._table.put(handle, value)

    def recall(self, command: UploadByDigest) -> None:
        """Add a value from a kept upload."""
        contents, handle = self._contents, command.handle
        if handle == GENERATOR_HANDLE:
            self._failures.add(ProtocolError("Handle 0 is reserved."))
            return
        self._memory.dropping((handle,))
        if not self.admits((handle,)):
            return
        if contents is None:
            self._table.put(handle, self._failures.add(ProtocolError("Nothing is kept for this session.")))
        else:
            tensor = self._failures.attempt(lambda: contents.recall(handle, command.digest))
            if isinstance(tensor, Poisoned):
                self._table.put(handle, tensor)
            else:
                self._put_kept(handle, tensor)
            self._memory.uploaded(handle)

    def make_resizable(self, handles: Sequence[int]) -> None:
        """Move values in memory of a fixed size, such as that of a file or of a kept upload, to separate memory."""
        for value in map(self._table.get, handles):
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            storage = value.untyped_storage()
            if not storage.resizable():
                own = copy_of(storage)
                for other in self._table.sharing(value):
                    self._table.put(other, placed_in(own, self._table[other]))

    def copy(self, command: Copy) -> None:
        """Add copies of values. Copies of values that share a storage share the copy of it."""
        if not self.admits([target for _, target, _ in command.handles]):
            return
        copied: dict[int, int] = {}
        for source, target, base in command.handles:
            if target == GENERATOR_HANDLE:
                self._failures.add(ProtocolError("Handle 0 is reserved."))
            else:
                self._table.put(target, self._failures.attempt(partial(self._copied, source, target, base, copied)))

    def _copied(self, source: int, target: int, base: int, copied: dict[int, int]) -> Any:
        """Copy a value; ``copied`` has the first copy of each storage, by the storage that was copied."""
        value, owner = self.value(source), self.value(base) if base else None
        if isinstance(owner, Poisoned) or not isinstance(value, torch.Tensor):
            return owner if isinstance(owner, Poisoned) else value
        storage = value.untyped_storage()
        if owner is None:
            first = copied.get(storage._cdata)
            self._memory.use((source, first or base), 0 if first else self._table.storage_bytes((source,)))
            if first:
                return placed_in(self._table[first].untyped_storage(), value)
            copied[storage._cdata] = target
            return placed_in(copy_of(storage), value)
        self._memory.use((source, base))
        if not isinstance(owner, torch.Tensor) or owner.untyped_storage().nbytes() != storage.nbytes():
            raise ProtocolError(f"Value {source} is no view of anything like value {base}.")
        return placed_in(owner.untyped_storage(), value)

    def fetch(self, handle: int, data: list[torch.Tensor]) -> Item:
        """Return a value in the form of an answer; append its tensor to ``data``, if it has one."""
        memory = self._memory
        with memory.lock:
            try:
                value = self._fetched(handle)
            except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
                value = self._failures.add(error)
            memory.release()
        if isinstance(value, Poisoned):
            return value
        if not isinstance(value, torch.Tensor):
            return Plain(messages.to_wire(value))
        try:
            item = header_of(value)
        except Exception as error:  # noqa: BLE001  # as above
            return self._failures.add(error)
        data.append(value)
        return item

    def _fetched(self, handle: int) -> Any:
        contents = self._contents
        if contents is not None and handle in (messages.MARKS_HANDLE, messages.DIGESTS_HANDLE):
            return contents.marks() if handle == messages.MARKS_HANDLE else contents.digests()
        if handle == GENERATOR_HANDLE:
            return self._random.get()
        if handle in REPORT_HANDLES:
            return self._reports.answer(handle)
        value = self.value(handle)
        if not isinstance(value, torch.Tensor):
            return value
        self._memory.use((handle,))
        return self.read(value)

    def describe(self, handle: int) -> Item:
        """Return the metadata of a value in the form of an answer."""
        value = self.value(handle)
        if isinstance(value, Poisoned):
            return value
        item: Item = self._failures.attempt(lambda: metadata_of(value))
        return item

    def clear(self, keeping: Collection[int] = ()) -> None:
        """Drop all values but these, and the claims to kept uploads."""
        for handle in keeping:
            self.value(handle)
            self._table.written(handle)
        if keeping:
            self.free([handle for handle in self._table if handle not in keeping])
        else:
            self._table.clear()
        if self._contents is not None:
            self._contents.close()
