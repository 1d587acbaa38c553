"""The setting of values that the client knows."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("KnownValueSettings",)


@attrs.frozen
class KnownValueSettings:
    """Which values the client computes itself."""

    known_value_bytes: int = setting(
        4096, minimum=0, help="largest integer or boolean tensor, in bytes, that the client keeps or computes itself "
                              "where a value depends only on uploads and constants; `0`: none")
