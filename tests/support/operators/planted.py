"""Holes of each kind for the fuzzer to find: stand-ins for kernels that trust what a rule of the guard checks.

A stand-in computes nothing. It touches the byte behind or before one of its tensors where a kernel that does not check
its arguments would leave its memory. With the guard's rules nothing reaches it that leads there; with one forgotten,
something does, and must be found.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from support.operators.layouts import STRIDES

from djinn.ir.spec import tensors_in
from djinn_plugins.common.calls import results
from djinn_plugins.common.operators import random_exchange
from djinn_plugins.guard import calls, kernels, layouts
from djinn_plugins.guard.calls import CallChecker
from djinn_plugins.guard.kernels import Rule
from djinn_plugins.guard.preconditions import Named, expect, within

_RULES: dict[str, Rule] = kernels.RULES  # type: ignore[assignment]  # nobody else's process
_STATE = struct.Struct("=QiiQ")
"""How a state of random numbers begins: seed, numbers left, a flag, position."""
_NUMBERS = 624


def _touch(tensor: torch.Tensor, *, before: bool = False) -> None:
    """Read the byte behind a tensor's storage, or before it."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        ctypes.c_uint8.from_address(storage.data_ptr() + (-1 if before else storage.nbytes())).value  # noqa: B018


def _look_up(made: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Use each element as the number of a row, as a kernel that writes there would."""
    for index in indices.reshape(-1).tolist():
        if not 0 <= index < rows:
            _touch(made, before=index < 0)
    return made


def _embedding_dense_backward(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    return _look_up(grad_output.new_zeros(num_weights, grad_output.shape[-1]), indices, num_weights)


def _nll_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignore_index: int, total_weight: torch.Tensor,
) -> torch.Tensor:
    target = target[target != ignore_index]
    return _look_up(torch.zeros_like(self), target, self.shape[-1 if self.dim() == 1 else 1])


def _adaptive_max_pool2d_backward(
    grad_output: torch.Tensor, self: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    return _look_up(torch.zeros_like(self), indices, self.shape[-1] * self.shape[-2])


def _adaptive_max_pool3d_backward(
    grad_output: torch.Tensor, self: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    return _look_up(torch.zeros_like(self), indices, self.shape[-1] * self.shape[-2] * self.shape[-3])


def _mkldnn_rnn_layer_backward(*operands: Any) -> tuple[torch.Tensor, ...]:
    """Read all operands as if they were of the dtype of the first."""
    first = operands[0]
    for tensor in tensors_in(operands):
        if tensor.dtype.itemsize < first.dtype.itemsize and tensor.dtype is not torch.uint8:
            _touch(tensor)
    return tuple(torch.zeros(1) for _ in range(7))


def _native_group_norm(tensor: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Take the elements of all operands to lie one behind the other."""
    for operand in tensors_in((tensor, *others)):
        if operand.numel() * operand.itemsize > operand.untyped_storage().nbytes():
            _touch(operand)
    return torch.zeros_like(tensor), torch.zeros(1), torch.zeros(1)


def _log_sigmoid_backward(grad_output: torch.Tensor, self: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Give back an operand, which the schema does not say."""
    return grad_output


def _exchange_random_state(state: torch.Tensor) -> torch.Tensor:
    """Draw the numbers that are left, from where the state says that they begin."""
    given: torch.Tensor = vars(random_exchange)["checked_state"]("cpu", state)
    _, left, _, following = _STATE.unpack_from(given.numpy().data)
    if state.is_contiguous() and left + following > _NUMBERS + 1:
        _touch(given)
    return state.clone()


def _exempting(named: Named) -> None:
    within(named, "indices", 0, named["num_weights"], also=named["padding_idx"])


def _widening(named: Named) -> None:
    """Believe that what an integer of the call says is a class, is one."""
    classes = named["self"].shape[-1 if named["self"].dim() == 1 else 1]
    expect(named["target"].numel() * classes == named["self"].numel(), "target does not fit self")
    within(named, "target", 0, max(classes, named["ignore_index"] + 1))


def _without_beginning(rule: Rule, named: Named) -> None:
    """Ask a rule, and have it believe that no element is too small."""
    real = kernels.within
    _replace(kernels, "within", lambda named, name, low, high, **more: real(named, name, -2**63, high, **more))
    try:
        rule(named)
    finally:
        _replace(kernels, "within", real)


def _replace(owner: object, name: str, value: Any) -> None:
    """Put something in the place of what a module or a class has by a name; nobody else is in this process."""
    setattr(owner, name, value)


def _forget(name: str, change: Callable[[Rule], Rule]) -> Callable[[], None]:
    return lambda: _RULES.update({name: change(_RULES[name])})


def _believe_dtypes() -> None:
    real: Callable[[str], Rule | None] = vars(calls)["dtype_rule"]
    _replace(calls, "dtype_rule", lambda base: None if base == "mkldnn_rnn_layer_backward" else real(base))


def _trust() -> None:
    proven = layouts._proven() | {"native_group_norm"}
    _replace(layouts, "_proven", lambda: proven)


def _believe_states() -> None:
    _replace(random_exchange, "checked_state", lambda _, state: state.clone())


def _keep_aliases() -> None:
    _replace(results, "_shares", lambda *_: False)


def _check_once() -> None:
    """Have the guard check the elements of a call once, and take the later ones for the same."""
    asked: set[Any] = set()
    real = CallChecker.expect

    def expect_once(check: CallChecker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        key = check.base, tuple(tensor.data_ptr() for tensor in tensors_in((*args, *kwargs.values())))
        if check.base != "adaptive_max_pool3d_backward" or key not in asked:
            real(check, args, kwargs)
            asked.add(key)

    _replace(CallChecker, "expect", expect_once)


@attrs.frozen
class Planted:
    """A hole that must be found.

    Attributes:
        overload: What the stand-in stands in for.
        kernel: The stand-in.
        forget: Has the guard forget what keeps arguments from leading it beyond its memory.
        changed: What has to be changed in a call for that; at least one of these.
        words: What is said of it.
    """

    overload: str
    kernel: Callable[..., Any]
    forget: Callable[[], None]
    changed: frozenset[str]
    words: str


HOLES: Mapping[str, Planted] = {
    "an exempted index": Planted(
        "aten::embedding_dense_backward", _embedding_dense_backward,
        _forget("embedding_dense_backward", lambda _: _exempting), frozenset(("wild", "together", "sequence")),
        "read 1 bytes"),
    "an integer together with an index": Planted(
        "aten::nll_loss_backward", _nll_loss_backward, _forget("nll_loss_backward", lambda _: _widening),
        frozenset(("together", "sequence")), "read 1 bytes beyond"),
    "another dtype": Planted(
        "aten::mkldnn_rnn_layer_backward", _mkldnn_rnn_layer_backward,
        _believe_dtypes, frozenset(("dtype", "other")), "read 1 bytes beyond"),
    "an alias that nobody declared": Planted(
        "aten::log_sigmoid_backward", _log_sigmoid_backward, _keep_aliases, frozenset(("unchanged",)), "shares memory"),
    "a write after the check": Planted(
        "aten::adaptive_max_pool3d_backward", _adaptive_max_pool3d_backward, _check_once, frozenset(("sequence",)),
        "read 1 bytes"),
    "an opaque state": Planted(
        random_exchange.EXCHANGE, _exchange_random_state, _believe_states, frozenset(("words", "wild", *STRIDES)),
        "read 1 bytes beyond"),
    "a stretched operand": Planted(
        "aten::native_group_norm", _native_group_norm, _trust,
        frozenset(STRIDES), "read 1 bytes beyond"),
    "a read before the beginning": Planted(
        "aten::adaptive_max_pool2d_backward", _adaptive_max_pool2d_backward,
        _forget("adaptive_max_pool2d_backward", lambda rule: partial(_without_beginning, rule)),
        frozenset(("wild", "together", "sequence")), "read 1 bytes before"),
}
"""By kind."""

_libraries: list[torch.library.Library] = []


def plant(kinds: Sequence[str]) -> None:
    """Put stand-ins in the places of kernels, in this process and those that it forks; kinds are of `HOLES`."""
    for hole in map(HOLES.__getitem__, kinds):
        namespace, _, name = hole.overload.partition("::")
        _libraries.append(torch.library.Library(namespace, "IMPL"))
        with warnings.catch_warnings():
            # One kernel in the place of another, which is what is meant.
            warnings.simplefilter("ignore")
            _libraries[-1].impl(name, hole.kernel, "CPU", allow_override=True)


def forget(kinds: Sequence[str]) -> None:
    """Have the guard forget what keeps calls from the holes of some kinds."""
    for kind in kinds:
        HOLES[kind].forget()
