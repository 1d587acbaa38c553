#!/usr/bin/env bash
# PyTorch 2.13.0: torch._foreach_mul_ that is refused has changed the tensors before the one that it refuses.
#
# Behaviour: a list of a float and an integer tensor is multiplied in place by 0.5. The integer tensor cannot hold the result, so
# the call raises, after the float tensor was changed. A program that catches the error and takes the loop instead multiplies twice.
# Expected: the list is checked before anything is written, as the schema has one call.
# Guess before the run: checked first. The guess missed.
# Why it matters here: optimizers and gradient clipping call such operators. A device that checks first, and one that runs the
# calls one by one, leave different tensors after an error.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   result type Float can't be cast to the desired output type L
#   [0.5, 0.5] [1, 1]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import torch

real, whole = torch.ones(2), torch.ones(2, dtype=torch.int64)
try:
    torch._foreach_mul_([real, whole], 0.5)
except RuntimeError as error:
    print(str(error)[:60])
else:
    raise SystemExit("it is accepted now")
print(real.tolist(), whole.tolist())
assert real.tolist() == [0.5, 0.5] and whole.tolist() == [1, 1]
PROGRAM
