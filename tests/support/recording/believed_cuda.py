"""A session whose client takes its executor for ``cuda:0``, so that it records what it would record for one.

The executor computes on the CPU: numbers are those of its kernels, operators are those for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from djinn_interceptor_device import optimizers
from djinn_lib_schedule.wrapping import unwrapped

import djinn
from djinn.session import runtime


@contextmanager
def believed_cuda(**settings: Any) -> Iterator[None]:
    """Begin a session, with the settings of `djinn.init`."""
    djinn.init(**settings)
    try:
        link = unwrapped(runtime.current().backend)
        believed = msgspec.structs.replace(link.welcome, device="cuda:0")
        object.__setattr__(link, "welcome", believed)
        optimizers.follow("cuda:0")
        yield
    finally:
        djinn.shutdown()
