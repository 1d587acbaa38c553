"""Stacks of recurrent layers on a device whose library computes each with one call.

Without gradients, and forward, a stack is one operation; so is its backward pass. That is what local PyTorch does on a
CUDA device, with cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.autograd.function import once_differentiable

from djinn_plugins.common.device_report import DeviceProperties
from djinn_plugins.common.operators.recurrent import LSTM, recurrent_operators
from djinn_plugins.device.interceptor import gradients

__all__ = ("RecurrentStack", "computed_whole", "is_computed_whole")

_DTYPES = frozenset((torch.float16, torch.float32, torch.float64))
"""Dtypes whose layers PyTorch gives to cuDNN; see ``cudnn_is_acceptable`` of aten/src/ATen/native/ConvUtils.h."""
_below_autograd = torch._C._AutoDispatchBelowAutograd


@attrs.frozen
class RecurrentStack:
    """A stack of layers, without its tensors.

    Attributes:
        by_input: PyTorch's operator for it.
        mode: One of the kinds of `djinn_plugins.common.operators.recurrent`.
        batch_sizes: Those of a packed sequence; empty for another one.
        has_biases, num_layers, train, bidirectional, batch_first: As in PyTorch's function.
    """

    by_input: Callable[..., Any]
    mode: int
    batch_sizes: tuple[int, ...]
    has_biases: bool
    num_layers: int
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def states(self) -> int:
        """Number of its states."""
        return 2 if self.mode == LSTM else 1

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Record it: returns the output and the last states."""
        sequence, states, params = self._parts(tensors)
        with _below_autograd():
            if self.batch_sizes:
                return tuple(recurrent_operators().packed(
                    sequence, self.batch_sizes, states, params, self.mode, self.has_biases, self.num_layers, self.train,
                    self.bidirectional))
            return tuple(self.by_input(
                sequence, states if self.mode == LSTM else states[0], params, self.has_biases, self.num_layers, 0.0,
                self.train, self.bidirectional, self.batch_first))

    def run_backward(
        self, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Record its backward pass: returns the gradients of all tensors."""
        sequence, states, params = self._parts(tensors)
        return tuple(recurrent_operators().backward(
            list(given), sequence, self.batch_sizes, states, params, self.mode, self.has_biases, self.num_layers,
            self.train, self.bidirectional, self.batch_first))

    def _parts(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        count = 1 + self.states
        return tensors[0], list(tensors[1:count]), list(tensors[count:])


class _Differentiable(torch.autograd.Function):
    """A stack of layers with the backward pass of the device's library."""

    @staticmethod
    def forward(ctx: Any, layers: RecurrentStack, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layers = layers
        ctx.save_for_backward(*tensors)
        return layers.run(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layers: RecurrentStack = ctx.layers
        return None, *layers.run_backward(ctx.saved_tensors, given)


def is_computed_whole(device: DeviceProperties, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether local PyTorch would give layers to the library of such a device, instead of decomposing them.

    Args:
        device: The executor's device.
        tensors: The sequence, the states, and the parameters.
    """
    if gradients.is_transformed():
        return False
    takes_all = all(tensor.dtype in _DTYPES and tensor.numel() for tensor in tensors)
    return not gradients.are_needed((tuple(tensors),), {}) or bool(
        device.cudnn and torch.backends.cudnn.enabled and takes_all)


def computed_whole(layers: RecurrentStack, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Record a stack of layers as one operation.

    Args:
        layers: The stack.
        tensors: The sequence, the states, and the parameters.
    """
    if not gradients.are_needed((tuple(tensors),), {}):
        return layers.run(tensors)
    found: tuple[torch.Tensor, ...] = _Differentiable.apply(layers, *tensors)  # type: ignore[no-untyped-call]  # untyped there
    return found
