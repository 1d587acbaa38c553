"""Layers over packed sequences, computed step by step as PyTorch's CPU kernels do, so that they round alike.

PyTorch's decompositions multiply the input of each position by the weights, where a CPU multiplies all positions at
once, and products of other heights may round differently.

Source:
    ``PackedLayer``, ``ReversedPackedLayer`` and the cells of aten/src/ATen/native/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it

from djinn_plugins.common.operators import recurrent as kinds

__all__ = ("packed_layer",)

State = tuple[torch.Tensor, ...]
"""Hidden state, and the cell's one for LSTM."""


def packed_layer(
    mode: int, data: torch.Tensor, batch_sizes: Sequence[int], state: Any, params: Sequence[torch.Tensor],
    has_biases: bool, bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """Compute one layer: its output, ``f32[sum(batch_sizes), C]``, and its final states."""
    states = tuple(state) if isinstance(state, (list, tuple)) else (state,)
    directions = 2 if bidirectional else 1
    width = len(params) // directions
    outputs, finals = [], []
    for direction in range(directions):
        weights = params[direction * width : (direction + 1) * width]
        begin = tuple(item[direction] for item in states)
        output, final = (_backwards if direction else _forwards)(
            _cell(mode, weights, has_biases), _from_input(data, weights, has_biases), batch_sizes, begin)
        outputs.append(output)
        finals.append(final)
    whole = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return whole, *(torch.stack(parts) for parts in zip(*finals, strict=True))


def _from_input(data: torch.Tensor, weights: Sequence[torch.Tensor], has_biases: bool) -> torch.Tensor:
    return F.linear(data, weights[0], weights[2] if has_biases else None)


def _cell(mode: int, weights: Sequence[torch.Tensor], has_biases: bool) -> Callable[[torch.Tensor, State], State]:
    """Return what computes the next state from a position's product with the input weights, and the state."""
    bias = weights[3] if has_biases else None
    projection = weights[-1] if len(weights) in (3, 5) else None

    def gates(state: State) -> torch.Tensor:
        return F.linear(state[0], weights[1], bias)

    def lstm(given: torch.Tensor, state: State) -> State:
        entry, forget, candidate, out = gates(state).add_(given).unsafe_chunk(4, 1)
        entry, forget, candidate, out = entry.sigmoid_(), forget.sigmoid_(), candidate.tanh_(), out.sigmoid_()
        held = (forget * state[1]).add_(entry * candidate)
        shown = out * held.tanh()
        return shown if projection is None else torch.matmul(shown, projection.t()), held

    def gru(given: torch.Tensor, state: State) -> State:
        from_input, from_state = given.unsafe_chunk(3, 1), gates(state).unsafe_chunk(3, 1)
        reset = from_state[0].add_(from_input[0]).sigmoid_()
        update = from_state[1].add_(from_input[1]).sigmoid_()
        new = from_input[2].add(from_state[2].mul_(reset)).tanh_()
        return ((state[0] - new).mul_(update).add_(new),)

    def simple(given: torch.Tensor, state: State) -> State:
        total = gates(state).add_(given)
        return (total.tanh() if mode == kinds.TANH else total.relu(),)

    return {kinds.LSTM: lstm, kinds.GRU: gru}.get(mode, simple)


def _forwards(
    cell: Callable[[torch.Tensor, State], State], given: torch.Tensor, batch_sizes: Sequence[int], state: State
) -> tuple[torch.Tensor, State]:
    steps, ended, position, last = [], [], 0, batch_sizes[0]
    for size in batch_sizes:
        if size < last:
            ended.append(tuple(item[size:last] for item in state))
            state = tuple(item[:size] for item in state)
        state = cell(given.narrow(0, position, size), state)
        steps.append(state[0])
        position, last = position + size, size
    ended.append(state)
    return torch.cat(steps), tuple(torch.cat(parts) for parts in zip(*reversed(ended), strict=True))


def _backwards(
    cell: Callable[[torch.Tensor, State], State], given: torch.Tensor, batch_sizes: Sequence[int], begin: State
) -> tuple[torch.Tensor, State]:
    steps, position, last = [], given.shape[0], batch_sizes[-1]
    state = tuple(item[:last] for item in begin)
    for size in reversed(batch_sizes):
        if size > last:
            state = tuple(torch.cat((item, first[last:size])) for item, first in zip(state, begin, strict=True))
        position, last = position - size, size
        state = cell(given.narrow(0, position, size), state)
        steps.append(state[0])
    return torch.cat(steps[::-1]), state
