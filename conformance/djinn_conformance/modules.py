"""Test cases for modules, from PyTorch's database of samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from djinn_conformance.journal import EventLog
from djinn_conformance.remote_calls import sent
from djinn_conformance.training import Case, training_spec

__all__ = ("cases",)

_SUITE = "modules"
_DATA_SEED = 31
_QUICK_SHARE = 3
_QUICK_SAMPLES = 4


def cases(device: torch.device, *, thorough: bool) -> Iterator[Case]:
    """List all cases; those of one group follow one another.

    Args:
        device: The device for the eager reference.
        thorough: Whether to use every sample of every module, rather than some samples of every third module.
    """
    from torch.testing._internal.common_modules import module_db

    for info in module_db if thorough else module_db[::_QUICK_SHARE]:
        for name in training_spec().module_dtypes if thorough else training_spec().module_dtypes[:1]:
            dtype = getattr(torch, name)
            if dtype not in info.supported_dtypes(device.type):
                continue
            for training in (True, False):
                yield from _samples(info, name, training, thorough=thorough)
        yield from _wrong(info)


def _samples(info: Any, dtype: str, training: bool, *, thorough: bool) -> Iterator[Case]:
    samples = _drawn(info.module_inputs_func, info, getattr(torch, dtype), training)
    step = 1 if thorough else max(1, len(samples) // _QUICK_SAMPLES)
    for index, sample in list(enumerate(samples))[::step]:
        yield Case(_SUITE, info.name, "train" if training else "eval", dtype, "steps", f"{index} {sample.desc}",
                   partial(_train, info, getattr(torch, dtype), sample, training))


def _drawn(function: Any, info: Any, dtype: torch.dtype, training: bool) -> list[Any]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(_DATA_SEED)
        return list(function(info, device="cpu", dtype=dtype, requires_grad=True, training=training))


def _train(info: Any, dtype: torch.dtype, sample: Any, training: bool, journal: EventLog) -> None:
    """Run steps of gradient descent, with random gradients of the results."""
    module = _moved(info, sample, dtype, journal.device).train(training)
    given = sample.forward_input
    args, kwargs = sent((given.args, given.kwargs), journal.device)
    torch.manual_seed(_DATA_SEED)  # eager has drawn the initial values from the same stream
    if info.is_lazy:
        module(*args, **kwargs)
    journal.note("module", module.state_dict())
    learns = training or info.train_and_eval_differ
    for step in range(training_spec().steps if learns else 1):
        outputs = module(*args, **kwargs)
        journal.note(f"result of step {step}", outputs)
        _descend(module, _differentiable(outputs), step, journal)
        journal.note(f"gradients of step {step}", [tensor.grad for tensor in _tensors((args, kwargs))])
        _clear((args, kwargs))
        journal.note(f"buffers after step {step}", dict(module.named_buffers()))


def _moved(info: Any, sample: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Construct a module on the CPU and move it, as users do."""
    given = sample.constructor_input
    module: torch.nn.Module = info.module_cls(*copy.deepcopy(given.args), **copy.deepcopy(given.kwargs))
    return module.to(device).to(dtype)


def _descend(module: torch.nn.Module, outputs: list[torch.Tensor], step: int, journal: EventLog) -> None:
    if not outputs:
        return
    drawn = torch.Generator().manual_seed(_DATA_SEED + step)
    cotangents = [torch.randn(output.shape, dtype=torch.complex64 if output.is_complex() else torch.float32,
                              generator=drawn).to(output.dtype).to(journal.device) for output in outputs]
    torch.autograd.backward(outputs, cotangents)
    journal.note(f"gradients of parameters of step {step}", {
        name: parameter.grad for name, parameter in module.named_parameters()})
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    if parameters:
        torch.optim.SGD(parameters, lr=0.01).step()
        module.zero_grad()
        journal.note(f"parameters after step {step}", parameters)


def _tensors(item: Any) -> list[torch.Tensor]:
    """List the leaves that receive gradients."""
    if isinstance(item, torch.Tensor):
        return [item] if item.requires_grad and item.is_leaf else []
    members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return [tensor for member in members for tensor in _tensors(member)]


def _clear(item: Any) -> None:
    for tensor in _tensors(item):
        tensor.grad = None


def _differentiable(item: Any) -> list[torch.Tensor]:
    """List the results that have gradients."""
    if isinstance(item, torch.Tensor):
        return [item] if item.requires_grad else []
    members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return [tensor for member in members for tensor in _differentiable(member)]


def _wrong(info: Any) -> Iterator[Case]:
    """List the samples that a module refuses."""
    from torch.testing._internal.common_modules import ModuleErrorEnum

    if info.module_error_inputs_func is None:
        return
    for training in (True, False):
        for index, error in enumerate(_drawn(info.module_error_inputs_func, info, torch.float32, training)):
            runs = error.error_on is not ModuleErrorEnum.CONSTRUCTION_ERROR
            yield Case(_SUITE, info.name, "train" if training else "eval", "float32", "refused", str(index),
                       partial(_refuse, info, error.module_error_input, training, runs))


def _refuse(info: Any, sample: Any, training: bool, runs: bool, journal: EventLog) -> None:
    module = _moved(info, sample, torch.float32, journal.device).train(training)
    if runs:
        args, kwargs = sent((sample.forward_input.args, sample.forward_input.kwargs), journal.device)
        journal.note("result", module(*args, **kwargs))
