"""What a server holds, by what it is for, and what has happened to it."""

from __future__ import annotations

from collections import Counter

from djinn_memory_tiered.roles import Gone, Role


class Accounts:
    """The books of all sessions of one server, in bytes of storages.

    Attributes:
        device: What lies on the device, by what it is for.
        device_bytes: The sum of these.
        ahead_bytes: Results on the device that nobody has asked for yet.
        host_bytes: What was moved to the host.
        evicted: How often something was evicted, by what it was.
        restored: How often something came back.
        moved_out_bytes, moved_in_bytes: Bytes that were copied to the host, and to the device.
        dropped_bytes: Bytes that were let go, to be reloaded or computed again.
        refused: How often there was no room.

    Concurrency:
        Changed by one thread at a time; read by any.
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
        """What the device holds."""
        return self.device_bytes + self.ahead_bytes

    def came(self, role: Role, size_bytes: int) -> None:
        """Enter that bytes lie on the device."""
        self.device[role] += size_bytes
        self.device_bytes += size_bytes

    def went(self, role: Role, size_bytes: int) -> None:
        """Enter that bytes no longer do."""
        self.came(role, -size_bytes)

    def recast(self, before: Role, role: Role, size_bytes: int, *, is_here: bool) -> None:
        """Enter that bytes are for something else."""
        if is_here:
            self.went(before, size_bytes)
            self.came(role, size_bytes)

    def described(self) -> str:
        """Say in words what the device holds."""
        parts = [f"{size_bytes} of {role.value}" for role, size_bytes in self.device.items() if size_bytes]
        parts += [f"{self.ahead_bytes} of results ahead"] if self.ahead_bytes else []
        return f"{self.held_bytes} bytes ({', '.join(parts)})" if parts else "nothing"
