"""PyTorch's process-wide switches that change results: by name and value, in a form that can be sent.

A call is recorded with the switches that are not at PyTorch's defaults, and runs under exactly these, whatever the
executor's process or its environment sets.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch

__all__ = ("SETTERS", "SWITCHES", "Switch", "Switches", "check_switches", "lock", "switched", "switches")

Switches: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values of the switches that are not at their defaults, in the order of `SWITCHES`."""


@attrs.frozen
class Switch:
    """One switch.

    Attributes:
        name: Its name on the wire.
        words: Its values in this process, and on the wire; PyTorch's default is the first.
        get: Returns its value.
        set: Sets it.
        is_here: Whether this release of PyTorch has it.
    """

    name: str
    words: Mapping[Any, str]
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    is_here: bool = True


def _function(name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(torch._C, name, None)
    return found


def _switch(name: str, words: Mapping[Any, str], get: str, change: str, *arguments: Any) -> Switch:
    reads, sets = _function(get), _function(change)
    if reads is None or sets is None:
        return Switch(name, words, _absent, _absent, is_here=False)
    return Switch(name, words, partial(reads, *arguments) if arguments else reads, partial(sets, *arguments))


def _absent(*_: Any) -> None:
    raise RuntimeError("This release of PyTorch has no such switch.")


def _flag(name: str, *, default: bool = False) -> Switch:
    return _switch(name, {default: _WORDS[default], not default: _WORDS[not default]}, f"_get_{name}", f"_set_{name}")


def _reduction(dtype: str) -> Switch:
    """Describe whether sums in matrix products may have a dtype, and whether the products may be split."""
    words = {(True, True): "on", (False, True): "off", (False, False): "unsplit"}
    made = _flag(f"cublas_allow_{dtype}_reduced_precision_reduction", default=True)
    takes_two = made.is_here and isinstance(made.get(), tuple)
    return attrs.evolve(made, words=words, set=lambda pair: made.set(*pair)) if takes_two else made


def _precision(backend: str, operation: str, *values: str) -> Switch:
    return _switch(f"fp32_precision_{backend}_{operation}", {value: value for value in values},
                   "_get_fp32_precision_getter", "_set_fp32_precision_setter", backend, operation)


def _attention_order() -> Switch:
    """Describe the order in which PyTorch tries the kernels of attention, as ``sdpa_kernel`` sets it."""
    made = _switch("attention_order", {}, "_get_sdp_priority_order", "_set_sdp_priority_order")
    if not made.is_here:
        return made
    default = tuple(map(int, made.get()))
    orders = (default, *(order for order in itertools.permutations(default) if order != default))
    return attrs.evolve(made, words={order: ",".join(map(str, order)) for order in orders},
                        get=lambda: tuple(map(int, made.get())), set=lambda order: made.set(list(order)))


def _deterministic() -> tuple[bool, bool]:
    is_on = _is_deterministic()
    return is_on, is_on and _only_warns()


def _matmul_precision() -> str:
    try:
        return _get_matmul_precision()
    except RuntimeError:
        # Both of PyTorch's interfaces were used, and disagree. The newer one has switches of its own below.
        return "highest"


def _flushes_denormal() -> bool:
    """Look whether this thread takes the smallest number for zero; PyTorch has no function that tells."""
    return _SMALLEST + _ZERO == _ZERO


_WORDS = {True: "on", False: "off"}
_SMALLEST, _ZERO = math.ulp(0.0), 0.0
# PyTorch's own functions, whatever replaces them later.
_is_deterministic = torch._C._get_deterministic_algorithms
_only_warns = torch._C._get_deterministic_algorithms_warn_only
_set_deterministic = torch._C._set_deterministic_algorithms
_get_matmul_precision = torch._C._get_float32_matmul_precision
lock = threading.RLock()
"""Held while the process has an executor's switches instead of its own."""

SWITCHES: dict[str, Switch] = {switch.name: switch for switch in (
    Switch("deterministic_algorithms", {(False, False): "off", (True, True): "warn", (True, False): "on"},
           _deterministic, lambda pair: _set_deterministic(pair[0], warn_only=pair[1])),
    _flag("deterministic_fill_uninitialized_memory", default=True),
    Switch("float32_matmul_precision", {word: word for word in ("highest", "high", "medium")}, _matmul_precision,
           torch._C._set_float32_matmul_precision),
    _precision("generic", "all", "none", "ieee", "tf32", "bf16"),
    _precision("cuda", "all", "none", "ieee", "tf32"),
    _precision("cuda", "matmul", "none", "ieee", "tf32"),
    _precision("cuda", "conv", "tf32", "none", "ieee"),
    _precision("cuda", "rnn", "tf32", "none", "ieee"),
    *(_precision("mkldnn", operation, "none", "ieee", "tf32", "bf16") for operation in "all matmul conv rnn".split()),
    _reduction("fp16"),
    _reduction("bf16"),
    _flag("cublas_allow_fp16_accumulation"),
    _flag("cpu_allow_fp16_reduced_precision_reduction"),
    _flag("math_sdp_allow_fp16_bf16_reduction"),
    *(_switch(f"attention_{kernel}", {True: "on", False: "off"}, f"_get_{kernel}_sdp_enabled",
              f"_set_sdp_use_{kernel}") for kernel in ("flash", "mem_efficient", "math", "cudnn")),
    _attention_order(),
    _flag("cudnn_enabled", default=True),
    _flag("cudnn_benchmark"),
    _flag("cudnn_deterministic"),
    _flag("mkldnn_enabled", default=True),
    _flag("mkldnn_deterministic"),
    _flag("nnpack_enabled", default=True),
    Switch("flush_denormal", {False: "off", True: "on"}, _flushes_denormal, torch.set_flush_denormal),
)}
"""All switches, in the order in which they are set: the older interface to precisions sets the newer one."""
_HERE = tuple((name, switch.get, next(iter(switch.words))) for name, switch in SWITCHES.items() if switch.is_here)
_WIDER = {name: "fp32_precision_generic_all" if name.endswith("_all") else f"{name.rpartition('_')[0]}_all"
          for name, switch in SWITCHES.items() if {"none", "ieee"} <= set(switch.words.values())
          and next(iter(switch.words)) == "none"}
"""Precisions without a name by default, and those that hold where they have none."""
_BY_WORD = {name: {word: value for value, word in switch.words.items()} for name, switch in SWITCHES.items()}
SETTERS = (
    "_set_deterministic_algorithms", "_set_float32_matmul_precision", "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32", "_set_cudnn_allow_tf32", "_set_onednn_allow_tf32",
    *(f"_set_sdp_{name}" for name in ("use_flash", "use_mem_efficient", "use_math", "use_cudnn", "priority_order")),
    *(f"_set_{name}" for name in SWITCHES))
"""Names of the functions of ``torch._C`` that change switches, in one release of PyTorch or another."""


def switches() -> Switches:
    """Return the switches that change what PyTorch does by default. Denormal numbers are flushed by threads."""
    found = _set_here()
    if not found:
        return ()
    words = dict(found)
    # PyTorch's older interface names the full precision on its way back to the default, which is the same unnamed.
    return tuple((name, word) for name, word in found if not (
        word == "ieee" and name in _WIDER and words.get(_WIDER[name], "none") in ("none", "ieee")))


def _set_here() -> Switches:
    """Return the switches that are not at PyTorch's defaults."""
    found = [(name, value) for name, get, default in _HERE if (value := get()) != default]
    # Others may have set a value that is not known here.
    return tuple((name, SWITCHES[name].words.get(value, str(value))) for name, value in found) if found else ()


def check_switches(given: Switches) -> None:
    """Check switches that a client has sent.

    Raises:
        ProtocolError: There is no such switch or value, or this release of PyTorch has no such switch.
    """
    # The interceptor needs this module while djinn itself is imported.
    from djinn.errors import ProtocolError

    for name, word in given:
        switch = SWITCHES.get(name)
        if switch is None or word not in _BY_WORD[name]:
            raise ProtocolError(f"Unknown process-wide switch {name[:60]!r} with the value {word[:20]!r}.")
        if not switch.is_here:
            raise ProtocolError(f"PyTorch {torch.__version__} has no process-wide switch {name!r}.")
    if len({name for name, _ in given}) < len(given):
        raise ProtocolError("A process-wide switch is given twice.")


@contextlib.contextmanager
def switched(wanted: Switches) -> Iterator[None]:
    """Let a block run under these switches, which were checked. The caller holds the executor's lock."""
    if switches() == wanted:
        yield
        return
    with lock:
        before = _set_here()
        try:
            _change(before, wanted)
            yield
        finally:
            _change(_set_here(), before)


def _change(before: Switches, after: Switches) -> None:
    """Set every switch that differs, in order; and then those that the older interface has set besides."""
    old, new = dict(before), dict(after)
    for name, get, default in _HERE:
        wanted = _BY_WORD[name].get(new[name], default) if name in new else default
        if old.get(name) != new.get(name) or get() != wanted:
            SWITCHES[name].set(wanted)
