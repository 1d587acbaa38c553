"""Recurrent layers over packed sequences, and gradients of recurrent layers, as operators of the namespace ``djinn``.

On a CUDA device PyTorch computes a stack of layers with one call of cuDNN, and its gradients with another one. The
first leaves a reserve for the second, whose size only cuDNN knows. The reserve does not leave these operators: the
backward operator runs the forward pass again, on the same operands, which gives the same reserve. So a client knows the
metadata of each result without a question, and a server need not trust bytes that cuDNN would take for granted.

PyTorch's autograd would do the same there, but it allows a process only one kind of accelerator (pytorch#161129). On a
CPU, autograd computes the gradients.

Source:
    ``_cudnn_rnn`` and ``_cudnn_rnn_backward`` of aten/src/ATen/native/cudnn/RNN.cpp, PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators

__all__ = ("GRU", "LSTM", "RECURRENT_OPERATORS", "RELU", "TANH", "RecurrentOperators", "recurrent_operators")

RELU, TANH, LSTM, GRU = range(4)
"""Kinds of layers, by cuDNN's numbers."""
_LAYERS = "Tensor[] hx, Tensor[] params, int mode, bool has_biases, int num_layers, bool train, bool bidirectional"
_PACKED, _BACKWARD = "recurrent_packed", "recurrent_backward"
_SCHEMAS = {
    _PACKED: f"(Tensor data, int[] batch_sizes, {_LAYERS}) -> Tensor[]",
    _BACKWARD: f"(Tensor[] gradients, Tensor input, int[] batch_sizes, {_LAYERS}, bool batch_first) -> Tensor[]",
}
RECURRENT_OPERATORS = frozenset(f"djinn::{name}" for name in _SCHEMAS)
"""Their names. None writes to an argument, or returns a view of one."""
_NO_TRAINING = "cudnn RNN backward can only be called in training mode"
aten = torch.ops.aten
_OVERLOADS = {RELU: (aten.rnn_relu.input, aten.rnn_relu.data), TANH: (aten.rnn_tanh.input, aten.rnn_tanh.data),
              LSTM: (aten.lstm.input, aten.lstm.data), GRU: (aten.gru.input, aten.gru.data)}


class RecurrentOperators(NamedTuple):
    """The operators.

    Attributes:
        packed: Computes a stack of layers over a packed sequence: the outputs, then the last states.
        backward: Returns the gradients of the input, of the states and of the parameters.
    """

    packed: Any
    backward: Any


@once
def recurrent_operators() -> RecurrentOperators:
    """Return the operators; the first call defines them."""
    kernels = {_PACKED: (_packed, _packed_meta), _BACKWARD: (_backward, _backward_meta)}
    return RecurrentOperators(*define_operators(_SCHEMAS, kernels))


def _run(
    tensor: torch.Tensor, batch_sizes: Sequence[int], hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor],
    mode: int, has_biases: bool, num_layers: int, train: bool, bidirectional: bool, batch_first: bool,
) -> Sequence[torch.Tensor]:
    """Compute a stack of layers, of a packed sequence if it has ``batch_sizes``."""
    by_input, by_data = _OVERLOADS[mode]
    states = list(hx) if mode == LSTM else hx[0]
    layers = states, list(params), has_biases, num_layers, 0.0, train, bidirectional
    if not batch_sizes:
        found: Sequence[torch.Tensor] = by_input(tensor, *layers, batch_first)
        return found
    # Its kernels read the sizes on the host.
    packed: Sequence[torch.Tensor] = by_data(tensor, torch.tensor(batch_sizes), *layers)
    return packed


def _packed(
    data: torch.Tensor, batch_sizes: Sequence[int], hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor],
    mode: int, has_biases: bool, num_layers: int, train: bool, bidirectional: bool,
) -> list[torch.Tensor]:
    found = _run(data, batch_sizes, hx, params, mode, has_biases, num_layers, train, bidirectional, False)
    return [tensor.contiguous() for tensor in found]


def _packed_meta(
    data: torch.Tensor, batch_sizes: Sequence[int], hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor],
    mode: int, has_biases: bool, num_layers: int, train: bool, bidirectional: bool,
) -> list[torch.Tensor]:
    output = data.new_empty(data.shape[0], hx[0].shape[2] * (1 + bidirectional))
    return [output, *(state.new_empty(state.shape) for state in hx)]


def _backward(
    gradients: Sequence[torch.Tensor], input: torch.Tensor, batch_sizes: Sequence[int],  # noqa: A002  # PyTorch's name
    hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], mode: int, has_biases: bool, num_layers: int,
    train: bool, bidirectional: bool, batch_first: bool,
) -> list[torch.Tensor]:
    if not train:
        raise RuntimeError(_NO_TRAINING)
    compute = _by_cudnn if input.is_cuda else _by_autograd
    found = compute(gradients, input, batch_sizes, hx, params, mode, has_biases, num_layers, bidirectional, batch_first)
    # cuDNN returns the gradients of all parameters in one tensor.
    return [gradient.clone(memory_format=torch.contiguous_format) for gradient in found]


def _by_cudnn(
    gradients: Sequence[torch.Tensor], tensor: torch.Tensor, batch_sizes: Sequence[int], hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor], mode: int, has_biases: bool, num_layers: int, bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    hidden, cell = hx[0].contiguous(), hx[1].contiguous() if mode == LSTM else None
    # With projections, the cells are wider than the outputs.
    width = hidden.shape[2] if cell is None else cell.shape[2]
    projected = 0 if width == hidden.shape[2] else hidden.shape[2]
    each = (4 if has_biases else 2) + bool(projected)
    layers = (mode, width, projected, num_layers, batch_first, 0.0, True, bidirectional, list(batch_sizes), None)
    output, _, _, reserve, weights = aten._cudnn_rnn(tensor, list(params), each, None, hidden, cell, *layers)
    of_output, of_hidden, of_cell = (*gradients, None)[:3]
    of_input, *of_states, of_params = aten._cudnn_rnn_backward(
        tensor, list(params), each, weights, hidden, cell, output, of_output, of_hidden, of_cell,
        *layers, reserve, [True, True, mode == LSTM, True])
    return [of_input, *of_states[: len(hx)], *of_params]


def _by_autograd(
    gradients: Sequence[torch.Tensor], tensor: torch.Tensor, batch_sizes: Sequence[int], hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor], mode: int, has_biases: bool, num_layers: int, bidirectional: bool,
    batch_first: bool,
) -> Sequence[torch.Tensor]:
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaves = [_leaf(operand) for operand in (tensor, *hx, *params)]
        count = 1 + len(hx)
        results = _run(leaves[0], batch_sizes, leaves[1:count], leaves[count:], mode, has_biases, num_layers, True,
                       bidirectional, batch_first)
        return torch.autograd.grad(results, leaves, [_alias(gradient) for gradient in gradients])


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return _alias(tensor).requires_grad_()


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements as an ordinary tensor, also if the tensor was made in inference mode."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _backward_meta(
    gradients: Sequence[torch.Tensor], input: torch.Tensor, batch_sizes: Sequence[int],  # noqa: A002  # PyTorch's name
    hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *_: Any,
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (input, *hx, *params)]
