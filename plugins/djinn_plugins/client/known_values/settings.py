"""The setting of values that the client knows."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("KnownValueSettings",)


@attrs.frozen
class KnownValueSettings:
    """Which values the client computes itself."""

    known_value_bytes: int = setting(
        4096, minimum=0, help="largest integer or boolean tensor, in bytes, of which the client keeps a copy when it "
                              "is uploaded; values that depend only on such tensors, on single real numbers and on "
                              "constants are computed by the client up to 256 times that size; `0`: none, and no "
                              "question about unchanged values is answered from memory")
