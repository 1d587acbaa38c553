"""Test cases for optimizers: PyTorch's database of settings, schedulers, gradient clipping and averaged models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

from djinn_conformance.journal import EventLog
from djinn_conformance.training import Case, SchedulerSpec, training_spec

__all__ = ("cases",)

_SUITE = "optimizers"
_DATA_SEED = 99


class Model(torch.nn.Module):
    """Parameters of many shapes, each of which affects the gradients of the others."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(_DATA_SEED)
        made = [torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32, generator=drawn)
                for shape in shapes * 3]
        count = len(shapes)
        self.parts = torch.nn.ParameterList(tensor.to(dtype) for tensor in made[:count])
        self.factors = torch.nn.ParameterList(
            torch.nn.Parameter(tensor.to(dtype), requires_grad=False) for tensor in made[count:2 * count])
        self.calls = torch.nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.targets = torch.nn.ParameterList(
            torch.nn.Parameter(tensor.to(dtype), requires_grad=False) for tensor in made[2 * count:])

    def forward(self) -> torch.Tensor:
        """Compute the loss, a real scalar."""
        self.calls.add_(1)
        errors = [(part * factor - target).abs().square().sum()
                  for part, factor, target in zip(self.parts, self.factors, self.targets, strict=True)]
        total: torch.Tensor = torch.stack(errors).sum() + errors[0] * errors[-1].sqrt()
        return total


def cases(device: torch.device, *, thorough: bool) -> Iterator[Case]:
    """List all cases; those of one group follow one another.

    Args:
        device: The device for the eager reference; PyTorch's support depends on its type.
        thorough: Whether to use every sample, rather than one per implementation.
    """
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        yield from _settings(info, device, thorough=thorough)
        yield from _wrong(info, device)
        yield from _its_schedulers(info)
    yield from _schedulers()
    yield from _clipping()
    yield from _averaging()


def _settings(info: Any, device: torch.device, *, thorough: bool) -> Iterator[Case]:
    """List every sample of an optimizer in every implementation available on this type of device."""
    spec = training_spec().optimizer(info.name)
    samples = list(info.optim_inputs_func(device.type))
    for implementation, flags in _implementations(info, device):
        for name in spec.dtypes or ():
            dtype = getattr(torch, name)
            if dtype.is_complex and not info.supports_complex:
                continue
            if not thorough and name != (spec.dtypes or ())[0]:
                continue
            for sample in samples if thorough else samples[:1]:
                for grouped in (False, True) if info.supports_param_groups else (False,):
                    title = f"{sample.desc}{', two groups' if grouped else ''}"
                    yield Case(_SUITE, info.name, implementation, name, "steps", title,
                               partial(_train, info, {**sample.kwargs, **flags}, spec.shapes or (), dtype, grouped))


def _implementations(info: Any, device: torch.device) -> Iterator[tuple[str, dict[str, bool]]]:
    yield "by default", {}
    flags = [flag for flag in info.supported_impls if flag != "fused" or device.type in info.supports_fused_on]
    if flags:
        yield "for-loop", dict.fromkeys(flags, False)
    for flag in flags:
        yield flag, {**dict.fromkeys(flags, False), flag: True}


def _train(
    info: Any, kwargs: dict[str, Any], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, grouped: bool,
    journal: EventLog,
) -> None:
    """Run steps; in the middle, load the state into a new optimizer, as from a checkpoint."""
    model = Model(shapes, dtype).to(journal.device)
    optimizer = _made(info.optim_cls, model, kwargs, grouped)
    steps = training_spec().steps
    for step in range(steps):
        if step == steps // 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = _made(info.optim_cls, model, kwargs, grouped)
            optimizer.load_state_dict(state)
        _step(info, optimizer, model, step, journal)
        _note(journal, step, model, optimizer)


def _made(kind: Any, model: Model, kwargs: dict[str, Any], grouped: bool) -> torch.optim.Optimizer:
    parts = list(model.parts)
    groups: list[Any] = [{"params": parts[::2]}, {"params": parts[1::2], "lr": 0.02}] if grouped else parts
    optimizer: torch.optim.Optimizer = kind(groups, **copy.deepcopy(kwargs))
    return optimizer


def _step(info: Any, optimizer: torch.optim.Optimizer, model: Model, step: int, journal: EventLog) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=bool(step % 2))
        loss: torch.Tensor = model()
        loss.backward()
        if info.only_supports_sparse_grads:
            for part in model.parts:
                part.grad = None if part.grad is None else part.grad.to_sparse()
        elif step % 2:
            torch.nn.utils.clip_grad_norm_(model.parts, 1.5)
        return loss

    if info.step_requires_closure or step == 1:
        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]  # a tensor, as in common usage
        journal.note(f"loss of step {step}", loss)
    else:
        closure()
        optimizer.step()


def _note(journal: EventLog, step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    journal.note(f"parameters after step {step}", list(model.parts))
    journal.note(f"gradients after step {step}", [_densely(part.grad) for part in model.parts])
    journal.note(f"state after step {step}", optimizer.state_dict())
    journal.note(f"buffers after step {step}", dict(model.named_buffers()))


def _densely(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _wrong(info: Any, device: torch.device) -> Iterator[Case]:
    """List the settings that an optimizer refuses."""
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum

    if info.optim_error_inputs_func is None:
        return
    for error in info.optim_error_inputs_func(device.type, torch.float32):
        steps = error.error_on is not OptimizerErrorEnum.CONSTRUCTION_ERROR
        yield Case(_SUITE, info.name, "wrong settings", "float32", "refused", error.optimizer_error_input.desc,
                   partial(_refuse, info, error.optimizer_error_input, steps))


def _refuse(info: Any, wrong: Any, steps: bool, journal: EventLog) -> None:
    """Build an optimizer that is invalid or cannot step; if there are only warnings, they count as exceptions."""
    import warnings

    moved: dict[int, torch.Tensor] = {}
    given = [torch.randn(2, 3)] if wrong.params is None else wrong.params
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer = info.optim_cls(_moved(given, journal.device, moved), **copy.deepcopy(wrong.kwargs))
        if steps:
            optimizer.step()


def _moved(given: Any, device: torch.device, moved: dict[int, torch.Tensor]) -> Any:
    """Move the parameters in an optimizer's argument; a tensor used several times stays one tensor."""
    if isinstance(given, torch.Tensor):
        if id(given) not in moved:
            made = torch.nn.Parameter(given.detach().to(device)) if given.is_leaf else given.to(device)
            if given.grad is not None:
                made.grad = given.grad.to(device)
            moved[id(given)] = made
        return moved[id(given)]
    if isinstance(given, dict):
        return {name: _moved(member, device, moved) for name, member in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_moved(member, device, moved) for member in given)
    return given


def _its_schedulers(info: Any) -> Iterator[Case]:
    """List the schedulers that PyTorch's database combines with an optimizer."""
    sample = next(iter(info.optim_inputs_func("cpu")))
    shapes = training_spec().optimizer(info.name).shapes or ()
    for index, makers in enumerate(info.scheduler_inputs):
        yield Case(_SUITE, info.name, "scheduled", "float32", "steps", f"schedulers {index}",
                   partial(_schedule, info, sample.kwargs, shapes, makers))


def _schedule(
    info: Any, kwargs: dict[str, Any], shapes: tuple[tuple[int, ...], ...], makers: Any, journal: EventLog
) -> None:
    model = Model(shapes, torch.float32).to(journal.device)
    optimizer = _made(info.optim_cls, model, kwargs, grouped=False)
    schedulers = [make(optimizer) for make in makers]
    for step in range(2 * training_spec().steps):
        _step(info, optimizer, model, 0, journal)
        for scheduler in schedulers:
            takes_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([model().detach()] if takes_metric else []))
            journal.note(f"scheduler after step {step}", _plain(scheduler.state_dict()))
            journal.note(f"learning rates after step {step}", scheduler.get_last_lr())
        _note(journal, step, model, optimizer)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not callable(value)}


def _schedulers() -> Iterator[Case]:
    """List every scheduler, with a plain learning rate and with a tensor."""
    from torch.testing._internal.common_optimizers import optim_db

    sgd = next(info for info in optim_db if info.name == "SGD")
    specs = {spec.name: spec for spec in training_spec().schedulers}
    for name in lr_scheduler.__all__:
        if name == "LRScheduler":  # the base class of all of them
            continue
        for rate in (0.05, torch.tensor(0.05)):
            yield Case(_SUITE, name, "tensor lr" if isinstance(rate, torch.Tensor) else "lr", "float32", "steps", "SGD",
                       partial(_schedule, sgd, {"lr": rate, "momentum": 0.8}, training_spec().shapes,
                               [partial(_scheduler, specs[name], specs)]))


def _scheduler(spec: SchedulerSpec, specs: dict[str, SchedulerSpec], optimizer: torch.optim.Optimizer) -> Any:
    arguments = dict(spec.arguments)
    arguments |= {name: partial(_power, base) for name, base in spec.powers.items()}
    if spec.schedulers:
        arguments["schedulers"] = [_scheduler(specs[name], specs, optimizer) for name in spec.schedulers]
    is_chain = spec.name == "ChainedScheduler"
    return getattr(lr_scheduler, spec.name)(*([] if is_chain else [optimizer]), **arguments)


def _power(base: float, epoch: int) -> float:
    return float(base**epoch)


def _clipping() -> Iterator[Case]:
    for name in ("float32", "float64", "bfloat16", "complex64"):
        for foreach in (None, False, True):
            for norm in (1.0, 2.0, 3.0, float("inf")):
                yield Case(_SUITE, "clip_grad_norm_", f"foreach={foreach}", name, "steps", f"norm {norm}",
                           partial(_clip, getattr(torch, name), foreach, norm))


def _clip(dtype: torch.dtype, foreach: bool | None, norm: float, journal: EventLog) -> None:
    model = Model(training_spec().shapes, dtype).to(journal.device)
    model().backward()
    utils = torch.nn.utils
    journal.note("norm", utils.clip_grad_norm_(model.parameters(), 0.5, norm, True, foreach))
    journal.note("clipped", [part.grad for part in model.parts])
    gradients = [part.grad for part in model.parts if part.grad is not None]
    total = utils.get_total_norm(gradients, norm, foreach=foreach)
    journal.note("total norm", total)
    utils.clip_grads_with_norm_(model.parameters(), 0.25, total, foreach)
    journal.note("clipped again", gradients)
    if not dtype.is_complex:
        utils.clip_grad_value_(model.parameters(), 0.01, foreach)
        journal.note("clipped by value", gradients)
    journal.note("as a vector", utils.parameters_to_vector(model.parts))
    for gradient in gradients:
        gradient.mul_(float("nan"))
    utils.clip_grad_norm_(model.parameters(), 0.5, norm, True, foreach)


def _averaging() -> Iterator[Case]:
    functions = {"swa": {}, "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
                 "swa, all at once": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
                 "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)}}
    for title, options in functions.items():
        for with_buffers in (False, True):
            yield Case(_SUITE, "AveragedModel", title, "float32", "steps", f"use_buffers={with_buffers}",
                       partial(_average, {**options, "use_buffers": with_buffers}))


def _average(options: dict[str, Any], journal: EventLog) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    data = torch.randn(training_spec().steps, 5, 3).to(journal.device)
    model.to(journal.device)
    averaged = swa_utils.AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        journal.note(f"average after step {step}", averaged.state_dict())
        journal.note(f"learning rates after step {step}", scheduler.get_last_lr())
    swa_utils.update_bn(list(data), averaged, journal.device)
    journal.note("average with statistics", averaged.state_dict())
    journal.note("result", averaged.eval()(data[0]))
