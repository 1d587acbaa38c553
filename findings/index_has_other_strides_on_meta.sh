#!/usr/bin/env bash
# PyTorch 2.13.0: indexing by a tensor gives other strides on the meta device than on the CPU.
#
# Behaviour: a tensor of size (2, 3, 1, 4) with strides (12, 1, 12, 3) is indexed at its third dimension, of size one. The CPU
# gives strides (12, 1, 3, 3), the meta device (12, 1, 12, 3).
# Expected: the same metadata, which is what the meta device is for.
# Guess before the run: equal, since both lay results out by TensorIterator. The guess missed in 20 of 320 forms.
# Why it matters here: a lazy device answers `.stride()` from such kernels before anything has run.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   CPU  (2, 3, 1, 4) (12, 1, 3, 3)
#   meta (2, 3, 1, 4) (12, 1, 12, 3)
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import torch

strided, index = torch.empty_strided((2, 3, 1, 4), (12, 1, 12, 3)), torch.tensor([0])
here = strided[:, :, index]
meta = strided.to("meta")[:, :, index.to("meta")]
print("CPU ", tuple(here.shape), here.stride())
print("meta", tuple(meta.shape), meta.stride())
assert here.shape == meta.shape and here.stride() == (12, 1, 3, 3) and meta.stride() == (12, 1, 12, 3)
PROGRAM
