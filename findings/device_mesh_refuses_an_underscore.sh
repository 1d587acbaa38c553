#!/usr/bin/env bash
# PyTorch 2.13.0: init_device_mesh refuses a device whose name has an underscore, and says that the name has an index.
#
# Behaviour: `torch.utils.rename_privateuse1_backend` documents that any name may be registered, and `torch.device` takes it.
# `init_device_mesh("my_device", (1,))` raises RuntimeError "Device type with index is not supported", because it tests the
# name with `str.isalpha`. `DeviceMesh("my_device", ...)`, the class that it makes, has no such test.
# Expected: a mesh, as for a name of letters only, or a message that names the underscore.
# Guess before the run: the name is only looked up. The guess missed.
# Why it matters here: the name of djinn's device has an underscore, as the names of other devices of third parties have.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   torch.device: my_device
#   DeviceMesh: my_device
#   init_device_mesh: ('Device type with index is not supported but got my_device. ', '
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import tempfile

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

torch.utils.rename_privateuse1_backend("my_device")
torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tempfile.mktemp()}")
print("torch.device:", torch.device("my_device"))
print("DeviceMesh:", DeviceMesh("my_device", [0], _init_backend=False).device_type)
try:
    init_device_mesh("my_device", (1,))
except RuntimeError as error:
    print("init_device_mesh:", str(error)[:66])
    assert "Device type with index is not supported" in str(error)
else:
    raise SystemExit("it is accepted now")
PROGRAM
