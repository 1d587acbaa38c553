"""Requests of a worker to its gateway, and the threads that wait for the replies."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ("PendingReplies",)


class _Numbered(Protocol):
    @property
    def number(self) -> int:
        """Number of the request."""


MAX_QUESTIONS = 8
"""Requests of one kind that wait for their replies at a time; the gateway pauses a worker that has asked much more."""
RequestT = TypeVar("RequestT", bound=_Numbered)
ReplyT = TypeVar("ReplyT", bound=_Numbered)


class PendingReplies(Generic[RequestT, ReplyT]):
    """Waits for replies by number.

    Args:
        send: Sends the gateway a request.
        timeout_s: How long to wait for a reply.

    Concurrency:
        Any thread.
    """

    def __init__(self, send: Callable[[RequestT], None], timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_QUESTIONS)
        self._waiting: dict[int, queue.SimpleQueue[tuple[ReplyT, int | None]]] = {}

    def ask(self, request: Callable[[int], RequestT]) -> tuple[ReplyT, int | None] | None:
        """Send a request, and wait for the reply and its descriptor, which the caller owns.

        Args:
            request: Makes the request with a number.

        Returns:
            ``None`` if the gateway does not answer.
        """
        if not self._places.acquire(timeout=self._timeout_s):
            return None
        try:
            return self._asked(request)
        finally:
            self._places.release()

    def _asked(self, request: Callable[[int], RequestT]) -> tuple[ReplyT, int | None] | None:
        answers: queue.SimpleQueue[tuple[ReplyT, int | None]] = queue.SimpleQueue()
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = answers
        found: tuple[ReplyT, int | None] | None = None
        try:
            self._send(request(number))
            found = answers.get(timeout=self._timeout_s)
        except (OSError, queue.Empty):
            pass
        with self._lock:
            del self._waiting[number]
        # A reply that came at the last moment has a descriptor, too.
        return answers.get_nowait() if found is None and not answers.empty() else found

    def answered(self, reply: ReplyT, descriptor: int | None) -> bool:
        """Handle a reply, and return whether a caller waits for it; otherwise, close its descriptor."""
        with self._lock:
            answers = self._waiting.get(reply.number)
            if answers is not None:
                answers.put((reply, descriptor))
                return True
        if descriptor is not None:
            os.close(descriptor)
        return False
