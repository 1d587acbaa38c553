"""Compare djinn's operators of recurrent layers with local PyTorch on one device, bit by bit.

Usage: python recurrent_program.py DEVICE. It prints the cases that differ, one a line, and fails if there are any. It
does not import djinn itself: PyTorch trains on one kind of accelerator in a process.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

from djinn_plugins.common.operators.recurrent import GRU, LSTM, RELU, TANH, recurrent_operators

KINDS: dict[str, tuple[int, type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (LSTM, nn.LSTM, {}), "GRU": (GRU, nn.GRU, {}), "RNN, tanh": (TANH, nn.RNN, {}),
    "RNN, relu": (RELU, nn.RNN, {"nonlinearity": "relu"}), "LSTM with projections": (LSTM, nn.LSTM, {"proj_size": 5}),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "batch first": {"batch_first": True}, "two layers each way": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False},
}
SIZES = (7, 5, 3)
"""Lengths of the sequences of a batch."""


def compare(device: str, dtype: torch.dtype, kind: str, form: dict[str, Any], *, is_packed: bool) -> str:
    """Return what differs; empty if nothing does."""
    mode, make, more = KINDS[kind]
    torch.manual_seed(0)
    layers = make(6, 8, **more, **form).to(device, dtype)
    layers.flatten_parameters()
    batch_first = layers.batch_first and not is_packed
    size = (len(SIZES), SIZES[0], 6) if batch_first else (SIZES[0], len(SIZES), 6)
    sequence = torch.randn(size).to(device, dtype)
    packed = nn.utils.rnn.pack_padded_sequence(sequence, torch.tensor(SIZES)) if is_packed else None
    leaf = (sequence if packed is None else packed.data).detach().clone().requires_grad_()
    given = leaf if packed is None else nn.utils.rnn.PackedSequence(leaf, packed.batch_sizes)
    batch_sizes = [] if packed is None else packed.batch_sizes.tolist()
    cells = layers.num_layers * (1 + layers.bidirectional)
    widths = (layers.proj_size or layers.hidden_size, layers.hidden_size)[: 2 if mode == LSTM else 1]
    states = [torch.randn(cells, len(SIZES), width).to(device, dtype).requires_grad_() for width in widths]
    output, last = layers(given, tuple(states) if mode == LSTM else states[0])
    results = [output if packed is None else output.data, *(last if mode == LSTM else (last,))]
    gradients = [torch.randn(result.shape).to(device, dtype) for result in results]
    params = list(layers.parameters())
    wanted = torch.autograd.grad(results, [leaf, *states, *params], gradients)
    operators = recurrent_operators()
    options = mode, layers.bias, layers.num_layers, True, layers.bidirectional
    with torch.inference_mode():
        operands = leaf.detach(), batch_sizes, [state.detach() for state in states], [one.detach() for one in params]
        found = operators.backward(gradients, *operands, *options, batch_first)
        made = operators.packed(*operands, *options) if is_packed else [result.detach() for result in results]
    if not all(map(torch.equal, made, results)):
        return "the results"
    names = ["the input", *("a state" for _ in states), *("a parameter" for _ in params)]
    differing = [name for name, mine, theirs in zip(names, found, wanted, strict=True) if not torch.equal(mine, theirs)]
    return f"the gradient of {', '.join(dict.fromkeys(differing))}" if differing else ""


def main(device: str) -> int:
    # The weights of the operators do not lie in one piece, of which cuDNN warns.
    warnings.filterwarnings("ignore", "RNN module weights are not part")
    failures = 0
    for dtype in (torch.float32, torch.float64) if device == "cpu" else (torch.float32, torch.float64, torch.float16):
        for kind in KINDS:
            for name, form in FORMS.items():
                for is_packed in (False, True):
                    said = compare(device, dtype, kind, form, is_packed=is_packed)
                    if said:
                        failures += 1
                        print(f"{str(dtype)[6:]}, {kind}, {name}{', packed' if is_packed else ''}: {said}")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))
