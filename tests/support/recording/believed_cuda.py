"""A session whose client takes its executor for ``cuda:0``, so that it records what it would record for one.

The executor computes on the CPU: numbers are those of its kernels, operators are those for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

import djinn
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session import runtime
from djinn_plugins.common.device_report import DeviceProperties
from djinn_plugins.device.interceptor import optimizers

H100 = DeviceProperties("cuda", "NVIDIA H100 80GB HBM3", 85_017_493_504, 132, 9, 0, has_bfloat16=True,
                        free_bytes=84_000_000_000, cudnn=91_900, attention=("flash", "efficient", "math", "cudnn"))
"""What an executor on such a device tells in its welcome."""


@contextmanager
def believed_cuda(**settings: Any) -> Iterator[None]:
    """Begin a session, with the settings of `djinn.init`."""
    djinn.init(**settings)
    try:
        link = unwrapped(runtime.current().backend)
        believed = msgspec.structs.replace(link.welcome, device="cuda:0", facts=msgspec.msgpack.encode(H100))
        object.__setattr__(link, "welcome", believed)
        optimizers.follow("cuda")
        yield
    finally:
        djinn.shutdown()
