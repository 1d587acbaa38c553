"""A memory manager that keeps every law, and others that do not."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from djinn.errors import OutOfMemoryError
from djinn.hookspecs import hookimpl
from djinn_plugins.common.kinds.memory import MemoryOptions
from djinn_plugins.executor.memory.manager import TieredManager
from djinn_plugins.executor.memory.roles import Role
from djinn_plugins.executor.memory.session import TieredMemory

BROKEN: dict[str, tuple[str, set[str]]] = {
    "restores-zeros": ("memory.results_equal", {"memory.refusal_changes_nothing", "memory.in_use_stays",
                                                "memory.all_returned"}),
    "knows-no-limit": ("memory.limit_kept", {"memory.refusal_changes_nothing"}),
    "has-no-room": ("memory.room_used", {"memory.refusal_changes_nothing"}),
    "clears-when-full": ("memory.refusal_changes_nothing", {"memory.results_equal", "memory.in_use_stays",
                                                            "memory.all_returned"}),
    "evicts-in-use": ("memory.in_use_stays", set()),
    "reports-half": ("memory.usage_honest", set()),
    "returns-too-little": ("memory.all_returned", set()),
}
"""Name of each broken manager, the law that it breaks, and others that it may break as a consequence."""


class _Executor:
    """An executor whose values come back as zeros."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def can_offload(self, storage: torch.UntypedStorage) -> bool:
        return bool(self._executor.can_offload(storage))

    def copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.zeros_like(self._executor.copy_out(storage))

    def offload(self, storage: torch.UntypedStorage) -> None:
        self._executor.offload(storage)

    def restore(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        self._executor.restore(storage, data)


class _Memory(TieredMemory):
    """The memory of a session, with a flaw."""

    def __init__(self, manager: _Manager, *arguments: Any) -> None:
        super().__init__(manager.device, *arguments)
        self._flaw = manager.flaw

    def with_room_to_put(self, put: Any) -> Any:
        return self._clearing(super().with_room_to_put(put))

    def with_room_to_run(self, execute: Any) -> Any:
        return self._clearing(super().with_room_to_run(execute))

    def _clearing(self, action: Any) -> Any:
        def flawed(*arguments: Any) -> Any:
            try:
                return action(*arguments)
            except OutOfMemoryError:
                self._clear()
                raise

        return flawed

    def _clear(self) -> None:
        if self._flaw == "clears-when-full":
            for handle in self.values:
                if isinstance(self.values[handle], torch.Tensor):
                    self.values[handle].untyped_storage().fill_(0)

    def close(self) -> None:
        super().close()
        if self._flaw == "returns-too-little":
            self._device.accounts.came(Role.UNKNOWN, 64)


class _Manager(TieredManager):
    """A manager with a flaw."""

    def __init__(self, executor: Any, options: MemoryOptions, spare: Any, flaw: str) -> None:
        limit_bytes = {"knows-no-limit": 0, "has-no-room": options.limit_bytes // 100}.get(flaw, options.limit_bytes)
        super().__init__(_Executor(executor) if flaw == "restores-zeros" else executor,
                         attrs.evolve(options, limit_bytes=limit_bytes), spare)
        self.flaw = flaw
        if flaw == "evicts-in-use":
            def relief() -> bool:
                self.device.release()
                return self.device.relieve()

            executor.relief = relief

    def join(self, *arguments: Any) -> Any:
        made = _Memory(self, *arguments)
        self.device.join(made)
        return made

    def report(self) -> Any:
        found = super().report()
        if self.flaw != "reports-half":
            return found
        return attrs.evolve(found, device={role: size_bytes // 2 for role, size_bytes in found.device.items()})


class _Factory:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def open(self, executor: Any, options: MemoryOptions, spare: Any = None) -> Any:
        return _Manager(executor, options, spare, self._flaw)


@hookimpl
def djinn_register_memory(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))
