"""Sizes of page-locked memory. The settings name them, and are declared before PyTorch is imported."""

from __future__ import annotations

__all__ = ("PIECE_BYTES", "STAGING_BYTES")

STAGING_BYTES = 2**25
"""Page-locked memory of one direction."""
PIECE_BYTES = 2**22
"""Larger tensors are copied in pieces of this size, so that one piece is staged while another is copied."""
