"""Asks the guard about calls by their metadata; no kernel is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.calls import check_of

__all__ = ("ask", "empty")


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor without elements."""
    return torch.empty(size, dtype=dtype, device="meta")


def ask(name: str, args: Sequence[Any], words: dict[str, Any]) -> None:
    """Ask about a call of an ATen operator; raises what the guard refuses it with."""
    check = check_of(operator_named(f"aten::{name}"), 0)
    assert check is not None
    check.expect(args, words)
