"""Calls of PyTorch's operators, recorded while families of models and its own databases run.

Forward without gradients, where composite operators are seen whole, and forward and backward with them.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from djinn.ir.spec import tensors_in
from djinn_conformance.database import operators
from djinn_conformance.seeding import quietly
from djinn_plugins.guard.allowlist import ALLOWED, group_of

SEED = 7
DTYPES = (torch.float32, torch.int64, torch.float64, torch.complex64, torch.bfloat16, torch.bool, torch.uint8)
MOST_ELEMENTS = 6000
"""Calls with larger tensors are not kept: pages matter here, not volume."""
MOST_CALLS = 24
"""Calls kept for each overload."""
MOST_OF_MODELS = 8
"""Those of them that models made."""


@attrs.frozen(eq=False)
class Example:
    """Arguments of one call; its tensors are never written.

    Attributes:
        args: Those by position.
        kwargs: Those by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def mapped(item: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Replace the tensors of an argument."""
    if isinstance(item, torch.Tensor):
        return change(item)
    if isinstance(item, (list, tuple)):
        return [mapped(member, change) for member in item]
    return item


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides; its storage reaches as far as it does, and no further."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or type(tensor) not in PLAIN:
        raise TypeError(f"{type(tensor).__name__} on {tensor.device}")
    reach = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    whole = torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset()).clone()
    return torch.as_strided(whole, tensor.shape, tensor.stride(), 0)


PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: there are tens of thousands, and PyTorch's own way knows not all dtypes."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return NotImplemented
        item = duplicate(item)
        storage = item.untyped_storage()
        data = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
        return _rebuilt, (data, item.dtype, tuple(item.shape), item.stride())


def _rebuilt(data: bytes, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty_strided(size, stride, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return torch.as_strided(flat, size, stride, 0)


def pickled(item: Any) -> bytes:
    """Write calls for another process of ours."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(item)
    return buffer.getvalue()


@attrs.define
class Corpus:
    """What was recorded, by overload.

    Attributes:
        calls: The calls, each under what tells it from others.
        most: How many are kept of an overload.
    """

    calls: dict[str, dict[tuple[Any, ...], Example]] = attrs.field(factory=dict)
    most: int = MOST_CALLS

    def candidate(
        self, operator: torch._ops.OpOverload, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Example] | None:
        """Copy a call that is about to be made; ``None`` if there are enough like it."""
        args = list(args)
        known = self.calls.setdefault(operator.name(), {})
        key = (*map(_kind, args), *((word, _kind(item)) for word, item in kwargs.items()))
        if len(known) >= self.most or key in known or sum(
                tensor.numel() for tensor in tensors_in([*args, *kwargs.values()])) > MOST_ELEMENTS:
            return None
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                return key, Example(tuple(mapped(item, duplicate) for item in args),
                                    {word: mapped(item, duplicate) for word, item in kwargs.items()
                                     if not isinstance(item, torch.Generator)})
        except (TypeError, RuntimeError):
            # Sparse tensors, subclasses, and others that have no remote form.
            return None

    def examples(self, name: str) -> list[Example]:
        """List what is known of an overload, in the order of recording."""
        return list(self.calls.get(name, {}).values())


def _kind(item: Any) -> Any:
    """Tell calls apart: by metadata of tensors, and by all else."""
    if isinstance(item, torch.Tensor):
        return tuple(item.shape), item.stride(), item.dtype
    if isinstance(item, (list, tuple)):
        return tuple(map(_kind, item))
    return repr(item) if isinstance(item, float) and math.isnan(item) else (type(item), item)


class Recorder(TorchDispatchMode):
    """Keeps the calls that a server would let in, and that succeed."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__()
        self._corpus = corpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten" or group_of(func.name()) != ALLOWED:
            return func(*args, **kwargs)
        found = self._corpus.candidate(func, args, kwargs)
        result = func(*args, **kwargs)
        if found is not None:
            self._corpus.calls[func.name()].setdefault(*found)
        return result


@contextmanager
def _quiet() -> Iterator[None]:
    with quietly():
        torch.manual_seed(SEED)
        random.seed(SEED)
        yield


def record(*, dtypes: int = len(DTYPES), samples: int = 1000, families: int = 0) -> Corpus:
    """Run models and the databases.

    Args:
        families: How many families of models, forward, backward, generation and training.
        dtypes: How many dtypes of the operators' database.
        samples: How many samples of each entry, dtype and direction.
    """
    corpus = Corpus(most=MOST_OF_MODELS)
    with _quiet():
        _run_families(corpus, families)
        corpus.most = MOST_CALLS
        for dtype in DTYPES[:dtypes]:
            for entry in operators().values():
                _run_operator(corpus, entry, dtype, samples)
        _run_foreach(corpus, DTYPES[:dtypes][:2])
        _run_modules(corpus, samples)
        _run_optimizers(corpus)
    return corpus


def _attempt(
    corpus: Corpus, function: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
    with_gradients: bool, finish: Callable[[Any], Any] = lambda result: result,
) -> None:
    """Record a call, and its backward pass; what is raised is not recorded."""
    try:
        with nullcontext() if with_gradients else torch.inference_mode(), Recorder(corpus):
            result = finish(function(*args, **(kwargs or {})))
            found = [tensor for tensor in tree_leaves(result)
                     if isinstance(tensor, torch.Tensor) and tensor.requires_grad] if with_gradients else []
            if found:
                torch.autograd.backward(found, [torch.randn_like(tensor) for tensor in found])
    except Exception:
        # Databases have samples that this PyTorch, or this machine, cannot run.
        return


def _drawn(draw: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Draw samples until the database fails."""
    try:
        yield from draw(*args, **kwargs)
    except Exception:
        return


def _run_operator(corpus: Corpus, entry: Any, dtype: torch.dtype, samples: int) -> None:
    names = [entry.op]
    if dtype in {torch.float32, torch.int64}:
        names += [entry.inplace_variant, *(way for alias in entry.aliases for way in (alias.op, alias.inplace_variant))]
    for with_gradients in (False, True):
        wanted = entry.supported_backward_dtypes("cpu") if with_gradients else entry.supported_dtypes("cpu")
        if dtype not in wanted or (with_gradients and not entry.supports_autograd):
            continue
        for sample in islice(_drawn(entry.sample_inputs, "cpu", dtype, requires_grad=with_gradients), samples):
            for function in names[:1] if with_gradients else names:
                if function is not None:
                    _attempt(corpus, function, (sample.input, *sample.args), sample.kwargs,
                             with_gradients=with_gradients, finish=sample.output_process_fn_grad)


def _run_families(corpus: Corpus, families: int) -> None:
    from support.models.model_families import FAMILIES, outcome_of

    for family in FAMILIES[:families]:
        _attempt(corpus, outcome_of, (family, family.model(), "cpu"), with_gradients=True)


def _run_foreach(corpus: Corpus, dtypes: Iterable[torch.dtype]) -> None:
    from torch.testing._internal import common_methods_invocations as database

    entries = [entry for kind in ("unary", "binary", "pointwise", "reduce", "other")
               for entry in getattr(database, f"foreach_{kind}_op_db")]
    for entry in entries:
        for dtype in dtypes:
            for sample in islice(_drawn(entry.sample_inputs, "cpu", dtype, noncontiguous=False), 12):
                for function in (entry.method_variant, entry.inplace_variant):
                    if function is not None:
                        _attempt(corpus, function, (sample.input, *sample.args), sample.kwargs, with_gradients=False)


def _run_modules(corpus: Corpus, samples: int) -> None:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for training in (True, False):
            for sample in islice(_drawn(info.module_inputs_func, info, device="cpu", dtype=torch.float32,
                                        requires_grad=True, training=training), samples):
                made, given = sample.constructor_input, sample.forward_input
                try:
                    module = info.module_cls(*made.args, **made.kwargs).train(training)
                except Exception:  # a module that cannot be made here
                    continue
                for with_gradients in (True, False):
                    _attempt(corpus, module, given.args, given.kwargs, with_gradients=with_gradients)


def _run_optimizers(corpus: Corpus) -> None:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for sample in _drawn(info.optim_inputs_func, device=torch.device("cpu"), dtype=torch.float32):
            for implementation in ({}, {"foreach": True}, {"fused": True}):
                _attempt(corpus, _step, (info.optim_cls, {**sample.kwargs, **implementation}), with_gradients=True)


def _step(optimizer: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in ((3,), (2, 5))]
    made = optimizer(parameters, **settings)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
