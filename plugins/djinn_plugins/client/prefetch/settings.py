"""The setting of prefetching."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("PrefetchSettings",)


@attrs.frozen
class PrefetchSettings:
    """How much is fetched in advance."""

    prefetch_bytes: int = setting(
        64 * 2**20, help="bytes of tensors that may be fetched together with one that a program saves or moves to the "
                         "CPU, because the program will ask for them next; `0`: none", minimum=0)
