#!/usr/bin/env bash
# safetensors 0.8.0 with PyTorch 2.13.0: a conjugated complex tensor is saved without its conjugation, silently.
#
# Behaviour: `tensor.conj()` is a view with a flag. `safetensors.torch` writes the memory of the view and ignores the flag,
# so the file holds the values before conjugation, and `load` gives them back. No warning, no error.
# Expected: the values of the tensor, as `torch.save` writes them, or an error as for tensors that are not contiguous.
# Guess before the run: the function resolves the flag or refuses the tensor. The guess missed.
# Why it matters here: a checkpoint that is saved from a remote device and from the CPU should be the same file. djinn sends
# values, so its file is right, and the two files differ.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   saved  [(1-2j), (3+4j)]
#   loaded [(1+2j), (3-4j)]
#   loaded from a file [(1+2j), (3-4j)]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
environment/bin/python - <<'PROGRAM'
import safetensors.torch
import torch

tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
loaded = safetensors.torch.load(safetensors.torch.save({"a": tensor}))["a"]
print("saved ", tensor.tolist())
print("loaded", loaded.tolist())
safetensors.torch.save_file({"a": tensor}, "a.safetensors")
print("loaded from a file", safetensors.torch.load_file("a.safetensors")["a"].tolist())
assert torch.equal(loaded, tensor.conj()) and not torch.equal(loaded, tensor)
PROGRAM
