"""What a piece of work is part of: prefill or decode, forward or backward."""

from __future__ import annotations

from enum import StrEnum


class ExecutionPhase(StrEnum):
    """What a piece of work is part of."""

    UNKNOWN = "unknown"
    FORWARD = "forward"
    """A forward pass of no more special kind."""
    LLM_PREFILL = "llm_prefill"
    """A language model reads a prompt: many positions at once, caches begin."""
    LLM_DECODE = "llm_decode"
    """A language model writes: one position (or a few) at a time, caches grow."""
    VISION_ENCODING = "vision_encoding"
    """Pixels become features."""
    VISION_DECODING = "vision_decoding"
    """Features become pixels, boxes or masks."""
    MULTIMODAL_FUSION = "multimodal_fusion"
    """Features of different modalities meet."""
    TRAINING_FORWARD = "training_forward"
    """A forward pass that a backward pass belongs to."""
    TRAINING = TRAINING_FORWARD
    """Another name of ``TRAINING_FORWARD``."""
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
