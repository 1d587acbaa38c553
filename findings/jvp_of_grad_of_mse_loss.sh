#!/usr/bin/env bash
# PyTorch 2.13.0: jvp(grad(mse_loss)) raises, although hessian(mse_loss), which is made of the same two, works.
#
# Behaviour: `torch.func.jvp(torch.func.grad(f), (x,), (v,))` is the documented way to a product with a Hessian. With mse_loss it
# raises RuntimeError "ZeroTensors are immutable", with huber_loss NotImplementedError; with l1_loss and smooth_l1_loss it works.
# `torch.func.hessian`, forward over reverse with vmap, works for all four.
# Expected: whatever hessian computes, a product with a vector computes as well.
# Guess before the run: all work. The guess missed for two of four.
# Why it matters here: nested transforms are compared with eager, also the errors; this one is eager's own.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   mse_loss: hessian works, jvp(grad): RuntimeError: ZeroTensors are immutable. Please use the 
#   huber_loss: hessian works, jvp(grad): NotImplementedError: Trying to use forward AD with huber_loss_b
#   l1_loss: hessian works, jvp(grad): works
#   smooth_l1_loss: hessian works, jvp(grad): works
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import torch
from torch.nn import functional

target, x = torch.full((3,), 0.5), torch.ones(3)
found = {}
for name in ("mse_loss", "huber_loss", "l1_loss", "smooth_l1_loss"):
    def loss(value, of=getattr(functional, name)):
        return of(value, target)

    torch.func.hessian(loss)(x)
    try:
        torch.func.jvp(torch.func.grad(loss), (x,), (x,))
        found[name] = "works"
    except (RuntimeError, NotImplementedError) as error:
        found[name] = f"{type(error).__name__}: {str(error)[:42]}"
    print(f"{name}: hessian works, jvp(grad): {found[name]}")
assert [text.partition(":")[0] for text in found.values()] == ["RuntimeError", "NotImplementedError", "works", "works"]
PROGRAM
