#!/usr/bin/env bash
# safetensors 0.8.0 with PyTorch 2.13.0: what `save` writes, `load` cannot read, and `load_file` can.
#
# Behaviour: `safetensors.torch.save` accepts float4_e2m1fn_x2 and float8_e8m0fnu, the dtypes of MX and NVFP4 checkpoints.
# `load_file` reads the file rightly. `load`, which takes the same bytes, raises KeyError 'F4' or 'F8_E8M0': its table of
# dtypes is another one. A slice of such a tensor, by `get_slice`, fails too: it counts elements where PyTorch counts pairs.
# Expected: the two readers know the same dtypes, and a name that a writer writes can be read.
# Guess before the run: both readers work, or the writer refuses. The guess missed.
# Why it matters here: a server that receives a file as bytes and one that opens it from its disk must read the same tensors.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   F4: load_file reads it, load raises KeyError 'F4'
#   F8_E8M0: load_file reads it, load raises KeyError 'F8_E8M0'
#   a slice of F4: shape '[2, 8]' is invalid for input of size 8
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
environment/bin/python - <<'PROGRAM'
import safetensors
import safetensors.torch
import torch

four = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
scales = torch.arange(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
for name, tensor in (("F4", four), ("F8_E8M0", scales)):
    safetensors.torch.save_file({"a": tensor}, name)
    read = safetensors.torch.load_file(name)["a"]
    assert read.dtype == tensor.dtype and torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    try:
        safetensors.torch.load(safetensors.torch.save({"a": tensor}))
    except KeyError as error:
        print(f"{name}: load_file reads it, load raises KeyError {error}")
    else:
        raise SystemExit(f"{name}: load reads it now")
with safetensors.safe_open("F4", "pt") as file:
    try:
        file.get_slice("a")[0:1]
    except RuntimeError as error:
        print("a slice of F4:", error)
    else:
        raise SystemExit("a slice works now")
PROGRAM
