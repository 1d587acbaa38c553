#!/usr/bin/env bash
# PyTorch 2.13.0: torch.linalg.matrix_rank(x, tol, out=o) leaves o unwritten, silently, if the tensors are of a subclass.
#
# Behaviour: for a subclass with `__torch_dispatch__`, here the one of PyTorch's own tests, the rank is computed and assigned to
# a local reference; the destination keeps what it held, and is returned as the result. Without `out=` the result is right.
# Expected: the destination holds the rank, or an error.
# Guess before the run: `out=` is written or refused. The guess missed.
# Why it matters here: tensors of a device in Python are of such a class, so a wrong number would be returned for each of them.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   out=: 7 returned: 7 without out=: 3
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import torch
from torch.testing._internal.two_tensor import TwoTensor

matrix = TwoTensor(torch.eye(3), torch.eye(3))
destination = TwoTensor(torch.tensor(7), torch.tensor(7))
returned = torch.linalg.matrix_rank(matrix, 0.1, out=destination)
plain = torch.linalg.matrix_rank(matrix, 0.1)
print("out=:", destination.a.item(), "returned:", returned.a.item(), "without out=:", plain.a.item())
assert (destination.a.item(), returned.a.item(), plain.a.item()) == (7, 7, 3)
PROGRAM
