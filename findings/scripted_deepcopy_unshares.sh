#!/usr/bin/env bash
# PyTorch 2.13.0: copy.deepcopy of a scripted module gives buffers that shared memory a memory each.
#
# Behaviour: two buffers are views of one storage. `copy.deepcopy` of the module and `torch.jit.save` with `torch.jit.load` of
# the scripted module keep that. `copy.deepcopy` of the scripted module does not: a write through one buffer is not seen by the
# other, so the copy computes other values.
# Expected: the same structure from each of the three copies.
# Guess before the run: all keep it. The guess missed for one.
# Why it matters here: moving and copying modules must keep what shares memory, and eager is what is compared with.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   deepcopy: [7.0, 7.0, 3.0]
#   save and load: [7.0, 7.0, 3.0]
#   deepcopy of scripted: [1.0, 2.0, 3.0]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import copy
import io

import torch


class Window(torch.nn.Module):
    def __init__(self):
        super().__init__()
        base = torch.arange(4.0)
        self.register_buffer("first", base[:3])
        self.register_buffer("last", base[1:])

    def forward(self, x):
        return x + self.first + self.last


def loaded(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


found = {}
for name, made in (("deepcopy", copy.deepcopy(Window())), ("save and load", loaded(torch.jit.script(Window()))),
                   ("deepcopy of scripted", copy.deepcopy(torch.jit.script(Window())))):
    made.first.fill_(7)
    found[name] = made.last.tolist()
    print(f"{name}: {found[name]}")
assert list(found.values()) == [[7, 7, 3], [7, 7, 3], [1, 2, 3]]
PROGRAM
