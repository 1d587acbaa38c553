"""Compare djinn's operators of attention with local PyTorch on one device, bit by bit.

Usage: python attention_program.py DEVICE. It prints the cases that differ, one a line, and fails if there are any. It
does not import djinn itself: PyTorch trains on one kind of accelerator in a process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from djinn_plugins.common.operators.attention import attention_operators

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.2}, "grouped": {"enable_gqa": True},
    "mask": {"attn_mask": torch.linspace(-1, 1, 33 * 33).view(33, 33)},
    "mask of bools": {"attn_mask": torch.ones(33, 33, dtype=torch.bool).tril(4)},
    "dropout": {"dropout_p": 0.25},
}
WIDTHS = (64, 36)


def compare(device: str, dtype: torch.dtype, width: int, form: dict[str, Any]) -> str:
    """Return what differs; empty if nothing does."""
    heads = 2 if form.get("enable_gqa") else 4
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, count, 33, width, generator=generator).to(device, dtype) for count in (4, heads, heads)]
    if width == WIDTHS[1]:
        # As projections leave them: heads side by side.
        given = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in given]
    mask = form.get("attn_mask")
    if mask is not None:
        mask = mask.to(device, mask.dtype if mask.dtype is torch.bool else dtype)
    options = (form.get("dropout_p", 0.0), form.get("is_causal", False), form.get("scale"),
               form.get("enable_gqa", False))
    named = dict(zip(("dropout_p", "is_causal", "scale", "enable_gqa"), options, strict=True))
    operators = attention_operators()
    torch.manual_seed(1)
    with torch.no_grad():
        wanted = F.scaled_dot_product_attention(*given, mask, **named)
    torch.manual_seed(1)
    with torch.inference_mode():
        if not torch.equal(operators.attend(*given, mask, *options), wanted):
            return "the result without gradients"
        if SDPBackend(operators.kernel(*given, mask, *options)) == SDPBackend.MATH:
            return ""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    torch.manual_seed(1)
    wanted = F.scaled_dot_product_attention(*leaves, mask, **named)
    gradient = torch.randn(wanted.shape, generator=generator).to(device, dtype)
    gradients = torch.autograd.grad(wanted, leaves, gradient)
    torch.manual_seed(1)
    with torch.inference_mode():
        out, sums, random = operators.attend_with_residuals(*given, mask, *options)
        found = operators.backward(gradient, out, sums, random, *given, mask, *options)
    if not torch.equal(out, wanted.detach()):
        return "the result with gradients"
    differing = [name for name, mine, theirs in zip(("query", "key", "value"), found, gradients, strict=True)
                 if not torch.equal(mine, theirs)]
    return f"the gradient of {', '.join(differing)}" if differing else ""


def main(device: str) -> int:
    failures = 0
    for dtype in DTYPES:
        for width in WIDTHS:
            for name, form in FORMS.items():
                said = compare(device, dtype, width, form)
                if said:
                    failures += 1
                    print(f"{str(dtype)[6:]}, width {width}, {name}: {said}")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))
