#!/usr/bin/env bash
# PyTorch 2.13.0: FlopCounterMode counts nothing for attention, for LSTM and for an encoder layer in evaluation on the CPU.
#
# Behaviour: scaled_dot_product_attention gives 0 FLOPs on the CPU, and so does nn.LSTM, while nn.GRU of the same size has
# 4,608. An encoder layer in evaluation counts 6,144 with gradients, and 0 under no_grad and in inference mode, where it
# takes one fused operator. Nothing says that an operator without a formula was left out.
# Expected: the products are counted whichever kernel computes them, or the total says what it lacks.
# Guess before the run: the same number in all grad modes, and attention as on CUDA. The guess missed.
# Why it matters here: costs of a graph are compared with this counter, and a device without fused kernels has more FLOPs.
#
# Output seen on 2026-11-29 (Python 3.11, Linux x86_64):
#   attention [0, 0, 0]
#   LSTM [0, 0, 0]
#   GRU [4608, 4608, 4608]
#   encoder layer, eval [6144, 0, 0]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install -q torch==2.13.0 numpy==2.4.6
environment/bin/python - <<'PROGRAM'
import warnings

import torch
from torch.utils.flop_counter import FlopCounterMode

warnings.simplefilter("ignore")


def counted(function, *arguments):
    found = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), FlopCounterMode(display=False) as counter:
            function(*arguments)
        found.append(counter.get_total_flops())
    return found


heads, steps, rows = torch.randn(2, 2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
found = {
    "attention": counted(torch.nn.functional.scaled_dot_product_attention, heads, heads, heads),
    "LSTM": counted(torch.nn.LSTM(8, 8), steps),
    "GRU": counted(torch.nn.GRU(8, 8), steps),
    "encoder layer, eval": counted(encoder, rows),
}
for name, flops in found.items():
    print(name, flops)
assert list(found.values()) == [[0, 0, 0], [0, 0, 0], [4608, 4608, 4608], [6144, 0, 0]]
PROGRAM
