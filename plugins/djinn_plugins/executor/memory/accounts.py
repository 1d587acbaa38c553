"""What a server holds, by role, and counts of evictions and restorations."""

from __future__ import annotations

from collections import Counter

from djinn_plugins.executor.memory.roles import Gone, Role


class Accounts:
    """Memory accounting for all sessions of one server, in bytes of storages.

    Attributes:
        device: Bytes on the device, by role.
        device_bytes: The sum of these.
        ahead_bytes: Results on the device that no client has requested yet.
        host_bytes: Bytes moved to the host.
        evicted: How often something was evicted, by kind.
        restored: How often something was restored.
        moved_out_bytes, moved_in_bytes: Bytes copied to the host, and to the device.
        dropped_bytes: Bytes dropped, to be reloaded or recomputed.
        refused: How often there was no room.

    Concurrency:
        One thread at a time may change it; any thread may read it.
    """

    def __init__(self) -> None:
        self.device: dict[Role, int] = dict.fromkeys(Role, 0)
        self.device_bytes = 0
        self.ahead_bytes = 0
        self.host_bytes = 0
        self.evicted: Counter[Gone] = Counter(dict.fromkeys(Gone, 0))
        self.restored = 0
        self.moved_out_bytes = 0
        self.moved_in_bytes = 0
        self.dropped_bytes = 0
        self.refused = 0

    @property
    def held_bytes(self) -> int:
        """Bytes on the device."""
        return self.device_bytes + self.ahead_bytes

    def came(self, role: Role, size_bytes: int) -> None:
        """Record that bytes were placed on the device."""
        self.device[role] += size_bytes
        self.device_bytes += size_bytes

    def went(self, role: Role, size_bytes: int) -> None:
        """Record that bytes were removed from the device."""
        self.came(role, -size_bytes)

    def recast(self, before: Role, role: Role, size_bytes: int, *, is_here: bool) -> None:
        """Record that bytes have another role."""
        if is_here:
            self.went(before, size_bytes)
            self.came(role, size_bytes)

    def described(self) -> str:
        """Describe the device's contents in words."""
        parts = [f"{size_bytes} of {role.value}" for role, size_bytes in self.device.items() if size_bytes]
        parts += [f"{self.ahead_bytes} of results ahead"] if self.ahead_bytes else []
        return f"{self.held_bytes} bytes ({', '.join(parts)})" if parts else "nothing"
