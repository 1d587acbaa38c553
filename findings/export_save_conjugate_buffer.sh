#!/usr/bin/env bash
# PyTorch 2.13.0: an exported program computes other values after torch.export.save and load, if a weight is conjugated.
#
# Behaviour: a parameter or buffer that is a conjugated view keeps its values in the exported program. `torch.export.save`
# writes the memory without the flag, so the loaded program computes with the values before conjugation. `torch.save` and
# `torch.jit.save` of the same module are right.
# Expected: the loaded program equals the saved one.
# Guess before the run: the archive is made of what torch.save writes, so it is right. The guess missed.
# Why it matters here: an exported program is one of the sources from which djinn reads weights.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   before saving [(1-2j), (3+4j)]
#   after loading [(1+2j), (3-4j)]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import io

import torch


class Rotation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.tensor([1 + 2j, 3 - 4j]).conj())

    def forward(self, x):
        return x * self.by


x = torch.ones(2, dtype=torch.complex64)
program = torch.export.export(Rotation(), (x,))
file = io.BytesIO()
torch.export.save(program, file)
file.seek(0)
before, after = program.module()(x).tolist(), torch.export.load(file).module()(x).tolist()
print("before saving", before)
print("after loading", after)
assert before == [1 - 2j, 3 + 4j] and after == [1 + 2j, 3 - 4j]
PROGRAM
