"""Histograms of integers, which are supported on GPUs but not on CPUs.

Programs convert to floating-point numbers if the device type is a CPU, as transformers does to count the tokens of each
expert. They cannot know the executor's device. If it is a CPU, the conversion is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from djinn_plugins.common.device_report import device_of

if TYPE_CHECKING:
    from djinn.session.session import Session

_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def histc(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a histogram: ``f64[bins]`` between conversions, if it is one of integers and the executor is a CPU.

    Counts are exact below 2**53. Edges of bins are rounded as eager rounds them for ``f64`` on a CPU.

    Source:
        ``histogram_histc`` of aten/src/ATen/native/Histogram.cpp; ``_histc_cuda`` of native/cuda/SummaryOps.cu.
    """
    dtype = args[0].dtype
    if dtype not in _INTEGERS or device_of(session.backend.welcome).kind != "cpu":
        return NotImplemented
    convert = torch.ops.aten._to_copy.default
    wide = session.dispatch(convert, (args[0],), {"dtype": torch.float64})
    counts = session.dispatch(operator, (wide, *args[1:]), kwargs)
    return session.dispatch(convert, (counts,), {"dtype": dtype})
