"""Trying again where a server asks for it, without making it worse."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from djinn.errors import RefusedError

__all__ = ("MAX_TRIES", "patiently")

MAX_TRIES = 8
"""A server that has refused so often has too much to do for long: whoever wants to go on has to ask anew."""
_random = random.SystemRandom()
_T = TypeVar("_T")


def patiently(
    connect: Callable[[float], _T], timeout_s: float, *, sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> _T:
    """Connect, and again when a server that refuses says so: at least as long after as it says, each time longer.

    Args:
        connect: Connects; takes how many seconds that may take.
        timeout_s: How long all of it may take.
        sleep: As of `time`.
        clock: As of `time`; monotonic.

    Raises:
        RefusedError: The server has refused too often or asks for more time than there is; says what to do.
        Exception: What ``connect`` raises otherwise.
    """
    deadline_s = clock() + timeout_s
    for tries in range(1, MAX_TRIES + 1):
        try:
            return connect(max(0.001, deadline_s - clock()))
        except RefusedError as error:
            if error.retry_after_s <= 0:
                raise
            # The jitter keeps those who were refused together from coming back together.
            pause_s = error.retry_after_s * 1.5 ** (tries - 1) * _random.uniform(1, 1.5)
            if tries == MAX_TRIES or clock() + pause_s >= deadline_s:
                raise type(error)(
                    f"{error.summary} It was asked {tries} times in {timeout_s - deadline_s + clock():.1f} s.",
                    hint=f"Try again in {error.retry_after_s:.1g} s, allow more time with connect_timeout_s, or use "
                         "another server.", retry_after_s=error.retry_after_s) from None
            sleep(pause_s)
    raise AssertionError("unreachable: the last try returns or raises")
