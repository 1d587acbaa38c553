#!/usr/bin/env bash
# PyTorch 2.13.0: within no_grad, the bits of F.linear depend on whether the weight's requires_grad flag is set.
#
# Behaviour: `F.linear(x, weight)` under `torch.no_grad()` gives two results for a weight and for `nn.Parameter` of it. The
# choice between one matrix product and a batch of them asks for `requires_grad` alone, not for the grad mode. So a model
# whose parameters were frozen by `requires_grad_(False)` computes other last bits than the same model under `no_grad`.
# Expected: a flag that only concerns gradients changes nothing where none are recorded.
# Guess before the run: equal bits. The guess missed (all of 20 seeds).
# Why it matters here: a device that promises eager's bits has to send the flag along with the operation.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   differ in some of 20 seeds
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import torch

torch.set_num_threads(1)
differing = 0
for seed in range(20):
    torch.manual_seed(seed)
    x, weight = torch.randn(1, 3, 8), torch.randn(20, 8)
    with torch.no_grad():
        plain = torch.nn.functional.linear(x[:, -1:, :], weight)
        flagged = torch.nn.functional.linear(x[:, -1:, :], torch.nn.Parameter(weight))
    assert torch.allclose(plain, flagged, atol=1e-6)
    differing += not torch.equal(plain, flagged)
print("differ in", "some" if differing else "none", "of 20 seeds")
assert differing
PROGRAM
