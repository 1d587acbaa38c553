"""Conditions for the kernels of the CTC loss, which trust lengths and targets."""

from __future__ import annotations

from typing import Any

import torch

from djinn_plugins.guard.preconditions import Named, expect, expect_as_eager, has_elements, numel_is, within

__all__ = ("ctc_loss", "ctc_loss_backward")

_CHECKING = " (while checking arguments for ctc_loss_allocate_outputs)"
"""How PyTorch's messages about these arguments end."""


def ctc_loss(named: Named) -> None:
    """Check that lengths are within the sequences, and that targets are valid classes."""
    log_probs, targets = named["log_probs"], named["targets"]
    expect(log_probs.dim() in (2, 3), "log_probs has neither 2 nor 3 dimensions")
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if not _are_known(named):
        return
    inputs, wanted = _lengths(named["input_lengths"]), _lengths(named["target_lengths"])
    for name, lengths in (("input_lengths", inputs), ("target_lengths", wanted)):
        expect_as_eager(len(lengths) == batch, f"{name} must be of size batch_size")
    expect_as_eager(0 <= named["blank"] < classes, "blank must be in label range")
    _expect_lengths("target_lengths", wanted)
    if targets.dim() == 2:
        _expect_size(targets, 0, batch, exactly=True)
        _expect_size(targets, 1, max(wanted, default=0))
    else:
        expect_as_eager(targets.dim() == 1, f"Expected 1 to 2 dimensions, but got {targets.dim()}-dimensional tensor "
                                            f"for argument #2 'targets'{_CHECKING}")
        _expect_size(targets, 0, sum(wanted), exactly=True)
    _expect_lengths("input_lengths", inputs, steps)
    # Targets beyond their length are padding, which no kernel reads.
    rows = targets.unsqueeze(0) if targets.dim() == 1 else targets
    reach = [sum(wanted)] if targets.dim() == 1 else wanted
    for row, length in zip(rows, reach, strict=True):
        within({"targets": row[:length]}, "targets", 0, classes)


def _expect_lengths(name: str, lengths: list[int], most: int | None = None) -> None:
    for length in lengths:
        expect_as_eager(length >= 0, f"Expected {name} to have value at least 0, but got value {length}{_CHECKING}")
        expect_as_eager(most is None or length <= most,
                        f"Expected {name} to have value at most {most}, but got value {length}{_CHECKING}")


def _expect_size(targets: torch.Tensor, dim: int, size: int, *, exactly: bool = False) -> None:
    found = targets.shape[dim]
    expect_as_eager(found == size or (found > size and not exactly),
                    f"Expected tensor to have size {'' if exactly else 'at least '}{size} at dimension {dim}, but got "
                    f"size {found} for argument #2 'targets'{_CHECKING}")


def _are_known(named: Named) -> bool:
    lengths = named["input_lengths"], named["target_lengths"]
    return has_elements(*(given for given in lengths if isinstance(given, torch.Tensor)))


def _lengths(given: Any) -> list[int]:
    found = given.tolist() if isinstance(given, torch.Tensor) else given
    return [int(length) for length in found] if isinstance(found, (list, tuple)) else [int(found)]


def ctc_loss_backward(named: Named) -> None:
    """Check the results of the forward pass, too."""
    ctc_loss(named)
    log_probs = named["log_probs"]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    for name in ("grad", "neg_log_likelihood"):
        numel_is(named, name, batch)
    if not _are_known(named):
        return
    alpha = named["log_alpha"]
    expect(alpha.dim() == 3 and alpha.shape[0] == batch and alpha.shape[1] >= max(
        _lengths(named["input_lengths"]), default=0), "log_alpha does not fit log_probs")
    expect(alpha.shape[2] > 2 * max(_lengths(named["target_lengths"]), default=0), "log_alpha does not fit targets")
