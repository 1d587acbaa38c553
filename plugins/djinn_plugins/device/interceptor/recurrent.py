"""Recurrent layers, computed as local PyTorch does on the executor's type of device.

For a device of the client's type, PyTorch decomposes LSTM and GRU into fused cells that only GPUs have, one for each
position. If the executor has a GPU, a stack of layers is recorded whole, so that the executor uses cuDNN; if it has a
CPU, LSTM uses oneDNN's layers where local PyTorch does, and layers over packed sequences multiply as they do there.
PyTorch's own decompositions, which consist of ordinary operators, handle all other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it

from djinn.session import runtime
from djinn_plugins.common.device_report import DeviceProperties, device_of
from djinn_plugins.common.operators import recurrent as kinds
from djinn_plugins.device.interceptor import autocast
from djinn_plugins.device.interceptor.packed_recurrence import packed_layer
from djinn_plugins.device.interceptor.remote_recurrence import RecurrentStack, computed_whole, is_computed_whole

_without_functions = torch._C.DisableTorchFunctionSubclass
aten = torch.ops.aten
_LSTM = 2
"""``ideep::rnn_kind::LSTM``."""


def layers(mode: int, by_input: torch._ops.OpOverload, by_data: torch._ops.OpOverload) -> Callable[..., Any]:
    """Create the handler of a layer function; packed sequences use the second overload."""

    def handle(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = device_of(runtime.current().backend.welcome)
        is_packed, is_on_cpu = isinstance(args[3], (list, tuple)), device.kind == "cpu"
        if autocast.is_on() and (not is_on_cpu or (function is torch.lstm and not is_packed)):
            # Autocast lists such layers as a whole: oneDNN's LSTM, and all of cuDNN's.
            return autocast.lowered(lambda *lowered: handle(function, lowered, {}), args, kwargs)
        with _without_functions():
            found = None if is_on_cpu else _whole(device, mode, by_input, is_packed, *args)
            if found is not None:
                return found
            fuses = is_on_cpu and function is torch.lstm
            if is_packed:
                data, sizes, hx, *rest = args
                if fuses and bool((sizes == sizes[0]).all()) and _takes_fused_layers(data, hx):
                    # Nothing is padded, and eager computes the whole sequences.
                    whole: tuple[Any, ...] = data.unflatten(0, (len(sizes), -1)), hx, *rest, False
                    output, *states = _fused_stack(*whole)
                    return output.flatten(0, 1), *states
                return _packed_stack(mode if is_on_cpu else None, by_data, *args)
            return _fused_stack(*args) if fuses and _takes_fused_layers(*args[:2]) else _stack(by_input, *args)

    return handle


def _whole(device: DeviceProperties, mode: int, by_input: Callable[..., Any], is_packed: bool, *args: Any) -> Any:
    """Record a call as one operation; ``None`` if it is to be decomposed.

    With dropout between the layers, each layer is one operation: cuDNN would draw from random numbers of its own, which
    sessions do not have.
    """
    if is_packed:
        # The sizes of batches are never on a device.
        sequence, sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional = args
        batch_sizes, batch_first = tuple(sizes.tolist()), False
    else:
        sequence, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
        batch_sizes = ()
    states = hx if isinstance(hx, (list, tuple)) else (hx,)
    stack = RecurrentStack(by_input, mode, batch_sizes, has_biases, num_layers, train, bidirectional, batch_first)
    if not is_computed_whole(device, (sequence, *states, *params)):
        return None
    if not (dropout and train):
        return computed_whole(stack, (sequence, *states, *params))
    layer = attrs.evolve(stack, num_layers=1)

    def one(data: torch.Tensor, state: Any, weights: Sequence[torch.Tensor]) -> Any:
        return computed_whole(layer, (data, *(state if isinstance(state, list) else (state,)), *weights))

    return _each_layer(one, sequence, hx, params, num_layers, dropout)


def _takes_fused_layers(sequence: torch.Tensor, hx: Sequence[torch.Tensor]) -> bool:
    """Whether local PyTorch on a CPU uses oneDNN's layers; there are none with projections.

    Source:
        ``use_mkldnn`` and ``lstm`` of aten/src/ATen/native/RNN.cpp.
    """
    if not torch._C._get_mkldnn_enabled() or not sequence.numel() or hx[0].shape[2] != hx[1].shape[2]:
        return False
    if sequence.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if sequence.dtype == torch.float16:
        return not torch.is_grad_enabled() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return sequence.dtype == torch.float32


def _fused_stack(
    sequence: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Compute a stack of LSTM layers, with one oneDNN call per layer and direction.

    Their kernel checks the grad mode, which is not known where it runs. So it is passed in the argument ``train``,
    which the kernel ignores and the executor uses.

    Source:
        ``mkldnn_rnn`` of aten/src/ATen/native/mkldnn/RNN.cpp.
    """
    data = (sequence.transpose(0, 1) if batch_first else sequence).contiguous()
    first, cells = (state.contiguous() for state in hx)
    width, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    finals: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = list(params[index * width : (index + 1) * width])
            biases = [] if has_biases else [torch.zeros_like(weight) for weight in weights]
            output, hy, cy, _ = aten.mkldnn_rnn_layer(
                data, *weights, *biases, first[index], cells[index], direction > 0, [], _LSTM, first.shape[2],
                num_layers, has_biases, bidirectional, batch_first, torch.is_grad_enabled())
            outputs.append(output)
            finals[0].append(hy)
            finals[1].append(cy)
        data = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            data = torch.dropout(data, dropout, True)
    return data.transpose(0, 1) if batch_first else data, *(torch.stack(final) for final in finals)


def _stack(
    operator: torch._ops.OpOverload, sequence: torch.Tensor, hx: Any, params: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:
    """Compute stacked layers over ``f32[T, N, C]``, or ``f32[N, T, C]`` if the batch comes first."""
    if batch_first:
        sequence = sequence.transpose(0, 1)

    def one(data: torch.Tensor, state: Any, weights: Sequence[torch.Tensor]) -> Any:
        return _decomposed(operator, data, state, weights, has_biases, 1, 0.0, train, bidirectional, False)

    output, *states = _each_layer(one, sequence, hx, params, num_layers, dropout if train else 0.0)
    return output.transpose(0, 1) if batch_first else output, *states


def _packed_stack(
    mode: int | None, operator: torch._ops.OpOverload, data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any,
    params: Sequence[torch.Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool,
) -> Any:
    """Compute stacked layers over a packed sequence, ``f32[sum(batch_sizes), C]``; as a CPU, if there is a ``mode``."""
    sizes = batch_sizes.tolist()

    def one(layer_input: torch.Tensor, state: Any, weights: Sequence[torch.Tensor]) -> Any:
        if mode is not None:
            return packed_layer(mode, layer_input, sizes, state, weights, has_biases, bidirectional)
        return _decomposed(operator, layer_input, batch_sizes, state, weights, has_biases, 1, 0.0, train, bidirectional)

    return _each_layer(one, data, hx, params, num_layers, dropout if train else 0.0)


def _decomposed(operator: torch._ops.OpOverload, *args: Any) -> Any:
    from torch._decomp import decomposition_table

    return decomposition_table[operator](*args)


def _each_layer(
    one: Callable[[torch.Tensor, Any, Sequence[torch.Tensor]], Any], data: torch.Tensor, hx: Any,
    params: Sequence[torch.Tensor], num_layers: int, dropout: float,
) -> tuple[Any, ...]:
    """Feed layer by layer, with dropout between them. PyTorch's decomposition of the whole stack omits the dropout."""
    is_lstm = isinstance(hx, (list, tuple))
    states = list(hx) if is_lstm else [hx]
    width, depth = len(params) // num_layers, states[0].shape[0] // num_layers
    finals: list[list[torch.Tensor]] = [[] for _ in states]
    for index in range(num_layers):
        mine = [state[index * depth : (index + 1) * depth] for state in states]
        data, *new = one(data, mine if is_lstm else mine[0], params[index * width : (index + 1) * width])
        for final, state in zip(finals, new, strict=True):
            final.append(state)
        if dropout and index < num_layers - 1:
            data = torch.dropout(data, dropout, True)
    return data, *(torch.cat(final) for final in finals)


def cell(step: Callable[..., Any]) -> Callable[..., Any]:
    """Create the handler of a function that computes one position of a layer."""

    def handle(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _without_functions():
            return step(*args, **kwargs)

    return handle


def _lstm_cell(
    input: torch.Tensor,  # noqa: A002  # PyTorch's name; it may be passed by keyword
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``(hy, cy)``, ``f32[N, H]`` each, from ``f32[N, C]`` and the state ``(hx, cx)``.

    Source:
        ``LSTMCell`` of aten/src/ATen/native/RNN.cpp.
    """
    gates = F.linear(hx[0], w_hh, b_hh) + F.linear(input, w_ih, b_ih)
    entry, forget, cell, out = gates.unsafe_chunk(4, 1)
    cy = forget.sigmoid() * hx[1] + entry.sigmoid() * cell.tanh()
    return out.sigmoid() * cy.tanh(), cy


def _gru_cell(
    input: torch.Tensor,  # noqa: A002  # PyTorch's name; it may be passed by keyword
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``hy``, ``f32[N, H]``, from ``f32[N, C]`` and the state ``f32[N, H]``.

    Source:
        ``GRUCell`` of aten/src/ATen/native/RNN.cpp.
    """
    from_input = F.linear(input, w_ih, b_ih).unsafe_chunk(3, 1)
    from_state = F.linear(hx, w_hh, b_hh).unsafe_chunk(3, 1)
    reset = (from_state[0] + from_input[0]).sigmoid()
    update = (from_state[1] + from_input[1]).sigmoid()
    new = (from_input[2] + from_state[2] * reset).tanh()
    return (hx - new) * update + new


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: layers(kinds.LSTM, aten.lstm.input, aten.lstm.data),
    torch.gru: layers(kinds.GRU, aten.gru.input, aten.gru.data),
    torch.rnn_tanh: layers(kinds.TANH, aten.rnn_tanh.input, aten.rnn_tanh.data),
    torch.rnn_relu: layers(kinds.RELU, aten.rnn_relu.input, aten.rnn_relu.data),
    **dict.fromkeys((torch.lstm_cell, aten.lstm_cell, aten.lstm_cell.default), cell(_lstm_cell)),
    **dict.fromkeys((torch.gru_cell, aten.gru_cell, aten.gru_cell.default), cell(_gru_cell)),
}
