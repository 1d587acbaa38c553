"""Retries at a server's request, without adding to its load."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from djinn.errors import RefusedError
from djinn_plugins.common.net.waits import now_waiting

__all__ = ("MAX_TRIES", "patiently")

MAX_TRIES = 8
"""A server that has refused this often is overloaded for longer: raise the error, and let the caller decide when to
retry.
"""
_random = random.SystemRandom()
_T = TypeVar("_T")


def patiently(
    connect: Callable[[float], _T], timeout_s: float, *, sleep: Callable[[float], None] = sleep,
    clock: Callable[[], float] = monotonic,
) -> _T:
    """Connect, and retry as long as the server asks for it.

    Each pause is at least as long as the server requests, and grows with every refusal.

    Args:
        connect: Connects; takes the time limit in seconds.
        timeout_s: Time limit for all attempts together.
        sleep: As of `time`.
        clock: As of `time`; monotonic.

    Raises:
        RefusedError: The server has refused too often, or asks for more time than is left; the hint says what to do.
        Exception: Any other exception that ``connect`` raises.
    """
    deadline_s = clock() + timeout_s
    for tries in range(1, MAX_TRIES + 1):
        try:
            return connect(max(0.001, deadline_s - clock()))
        except RefusedError as error:
            if error.retry_after_s <= 0:
                raise
            # The jitter keeps clients that were refused together from retrying together.
            pause_s = error.retry_after_s * 1.5 ** (tries - 1) * _random.uniform(1, 1.5)
            if tries == MAX_TRIES or clock() + pause_s >= deadline_s:
                raise type(error)(
                    f"{error.summary} It was asked {tries} times in {timeout_s - deadline_s + clock():.1f} s.",
                    hint=f"Try again in {error.retry_after_s:.1g} s, allow more time with connect_timeout_s, or use "
                         "another server.", retry_after_s=error.retry_after_s) from None
            now_waiting(f"waiting for room on a server that is full, asked {tries} times")
            sleep(pause_s)
    raise AssertionError("unreachable: the last try returns or raises")
