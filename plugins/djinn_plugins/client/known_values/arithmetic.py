"""Real arithmetic that the client computes to the same bits as an executor, and how small it has to be."""

from __future__ import annotations

import torch

from djinn.ir.tape import Signature
from djinn.wire.messages import Welcome
from djinn_plugins.common.calls.processor import processor_name
from djinn_plugins.common.device_report import device_of

__all__ = ("ARITHMETIC", "HOME_BYTES", "KEPT_BYTES", "REALS", "computes_alike", "depends_on_threads")

HOME_BYTES = 2**20
"""Size of the largest value that the client computes. What is reduced from more than that, by a factor of more than a
hundred, belongs where it is; and there it stays.
"""
KEPT_BYTES = 64 * HOME_BYTES
"""Size of all uploads that the client keeps."""
REALS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
ARITHMETIC = frozenset("abs ceil div floor mean reciprocal relu round sign sqrt square trunc".split())
"""Operators, without their overloads, whose results the standard of floating-point numbers determines, beside those of
integers. No product of matrices and no exponential: libraries of the processor's maker compute those.
"""
_PIECEWISE = frozenset("arange cumsum mean prod sum".split())
"""Operators that PyTorch computes in pieces, which depend on the number of threads."""
_PIECE = 32_768
"""Elements below which one thread computes all: `at::internal::GRAIN_SIZE`."""


def computes_alike(welcome: Welcome) -> bool:
    """Whether an executor has this process's kernels: the same release of PyTorch for the same processors."""
    device = device_of(welcome)
    return (device.kind, device.name, str(welcome.torch)) == ("cpu", processor_name(), str(torch.__version__))


def depends_on_threads(name: str, signature: Signature) -> bool:
    """Whether the result of an operator may depend on how many threads compute it."""
    return name in _PIECEWISE and any(spec is not None and spec.dtype in REALS and spec.numel >= _PIECE
                                      for spec in (*signature.operands, *signature.results))
