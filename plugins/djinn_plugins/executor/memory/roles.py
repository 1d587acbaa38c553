"""The roles of memory."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of a storage in its session."""

    WEIGHT = "weight"
    """Uploaded, and never written since."""
    KV_CACHE = "kv_cache"
    """Grows from run to run or is written piece by piece, and is read by attention."""
    ACTIVATION = "activation"
    """Computed by a pure program."""
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    UNKNOWN = "unknown"


class Gone(StrEnum):
    """Kinds of evictions, for counting."""

    RESULTS_AHEAD = "results_ahead"
    """Results that no client had requested."""
    UPLOADS = "uploads"
    """Kept uploads that no session held."""
    WEIGHT = "weight"
    KV_CACHE = "kv_cache"
    ACTIVE_KV_CACHE = "active_kv_cache"
    """KV cache of a session that was decoding."""
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    UNKNOWN = "unknown"
