#!/usr/bin/env bash
# PyTorch 2.13.0: batch_norm writes its running statistics without counting it, so a gradient is silently wrong.
#
# Behaviour: autograd keeps tensors for the backward pass with their version, and raises if one was written since. In training,
# `F.batch_norm` changes `running_mean` and `running_var`, but their `_version` stays. A product that kept the old running mean
# gets the gradient of the new one, and nothing is raised. `add_` to the same buffer raises.
# Expected: the error of any other in-place write, or the right gradient (0 here).
# Guess before the run: every in-place write counts. The guess missed.
# Why it matters here: djinn uploads an ordinary tensor once per version. Statistics that a step on the CPU had changed were
# taken for unchanged; their contents are compared since.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   batch_norm: [0.1, 0.1, 0.1, 0.1] version 0
#   add_: one of the variables needed for gradient computation has 1
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import torch


def gradient(write):
    statistic, factor = torch.zeros(4), torch.ones(4, requires_grad=True)
    product = factor * statistic
    write(statistic)
    try:
        product.sum().backward()
    except RuntimeError as error:
        return str(error)[:56], statistic._version
    return factor.grad.tolist(), statistic._version


normed = gradient(lambda mean: torch.nn.functional.batch_norm(torch.ones(2, 4, 3, 3), mean, torch.ones(4), training=True))
added = gradient(lambda mean: mean.add_(0.1))
print("batch_norm:", [round(number, 3) for number in normed[0]], "version", normed[1])
print("add_:", *added)
assert normed[1] == 0 and abs(normed[0][0] - 0.1) < 1e-6 and isinstance(added[0], str) and added[1] == 1
PROGRAM
