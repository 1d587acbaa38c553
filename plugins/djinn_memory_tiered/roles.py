"""What memory is held for."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a storage is to the session that holds it."""

    WEIGHT = "weight"
    """Uploaded, and never written since."""
    KV_CACHE = "kv_cache"
    """Grows from run to run, or is written piece by piece, and is read by attention."""
    ACTIVATION = "activation"
    """Computed by a pure program."""
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    UNKNOWN = "unknown"


class Gone(StrEnum):
    """What was evicted, as it is counted."""

    RESULTS_AHEAD = "results_ahead"
    """Results that nobody had asked for."""
    UPLOADS = "uploads"
    """Kept uploads that no session held."""
    WEIGHT = "weight"
    KV_CACHE = "kv_cache"
    ACTIVE_KV_CACHE = "active_kv_cache"
    """Of a session that was decoding."""
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    UNKNOWN = "unknown"
