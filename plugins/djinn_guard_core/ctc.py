"""Conditions for the kernels of the CTC loss, which trust lengths and targets."""

from __future__ import annotations

from typing import Any

import torch

from djinn_guard_core.preconditions import Named, expect, has_elements, numel_is, within

__all__ = ("ctc_loss", "ctc_loss_backward")


def ctc_loss(named: Named) -> None:
    """Check that lengths are within the sequences, and that targets are valid classes."""
    log_probs, targets = named["log_probs"], named["targets"]
    expect(log_probs.dim() in (2, 3), "log_probs has neither 2 nor 3 dimensions")
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if not _are_known(named):
        return
    inputs, wanted = _lengths(named["input_lengths"]), _lengths(named["target_lengths"])
    expect(len(inputs) == len(wanted) == batch, f"{len(inputs)} and {len(wanted)} lengths of {batch} sequences")
    expect(all(0 <= length <= steps for length in inputs), f"input_lengths beyond {steps}")
    expect(all(length >= 0 for length in wanted), "negative target_lengths")
    if targets.dim() == 2:
        expect(targets.shape[0] == batch and max(wanted, default=0) <= targets.shape[1], "targets does not fit")
    else:
        expect(targets.dim() == 1 and sum(wanted) <= targets.numel(), "targets does not fit")
    expect(0 <= named["blank"] < classes, "blank is no class")
    # Targets beyond their length are padding, which no kernel reads.
    rows = targets.unsqueeze(0) if targets.dim() == 1 else targets
    reach = [sum(wanted)] if targets.dim() == 1 else wanted
    for row, length in zip(rows, reach, strict=True):
        within({"targets": row[:length]}, "targets", 0, classes)


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
