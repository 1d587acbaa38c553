"""The client's end of early answers; see `djinn_plugins.executor.early_answers`."""

from __future__ import annotations

from collections import OrderedDict, deque
from weakref import WeakValueDictionary

import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Poisoned, Result
from djinn_plugins.common.wire.assumptions import (
    MAX_BATCH_BYTES,
    MAX_EARLY,
    MAX_EARLY_BYTES,
    MAX_SENT,
    Assumed,
    decode_assumed,
    digest_of_batches,
    plain_bytes,
)

__all__ = ("EarlyInbox",)


class EarlyInbox:
    """The client's side: the batches that it sent, and the early answers that it received.

    Args:
        session: Name of the session, by which the answers of other sessions refer to its batches.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, session: str = "") -> None:
        _inboxes[session] = self
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=MAX_SENT)
        self._answers: OrderedDict[int, tuple[Result, list[torch.Tensor]]] = OrderedDict()

    def sent(self, number: int, encoded: memoryview) -> None:
        """Note a batch that is about to be sent."""
        self._sent.append((number, bytes(encoded) if len(encoded) <= MAX_BATCH_BYTES else b""))

    def arrived(self, number: int, result: Result, tensors: list[torch.Tensor], answered: int) -> None:
        """Take in an early answer.

        Args:
            number: Number of its batch.
            result: The answer.
            tensors: Its tensors.
            answered: Number of the last batch that was answered.

        Raises:
            ProtocolError: It is no early answer that a server may send.
        """
        if result.failures or result.timings or result.warnings or not result.items or any(
                isinstance(item, Poisoned) for item in result.items):
            raise ProtocolError("It answered a batch early with more than values.")
        size_bytes = sum(tensor.nbytes for tensor in tensors) + sum(map(plain_bytes, result.items))
        if size_bytes > MAX_EARLY_BYTES or len(result.items) > MAX_BATCH_BYTES or not result.since < number:
            raise ProtocolError(f"It answered batch {number} early, after batch {result.since}, with too much.")
        if number <= answered:
            return
        self._answers[number] = result, tensors
        if len(self._answers) > MAX_EARLY:
            raise ProtocolError(f"It answered more than {MAX_EARLY} batches early.")

    def take(self, number: int, values: int) -> tuple[Result, list[torch.Tensor]] | None:
        """Return the early answer to a batch that was sent, if it assumes exactly the batches that were sent.

        Args:
            number: Number of the batch.
            values: How many values it asks for.
        """
        while self._answers and min(self._answers) < number:
            del self._answers[min(self._answers)]
        found = self._answers.get(number)
        if found is None:
            return None
        result, tensors = found
        is_true = (len(result.items) == values and self.has_sent(result.since, number, result.assumes)
                   and all(map(_is_true, decode_assumed(result.others))))
        del self._answers[number]
        return (Result(result.items, run_ns=result.run_ns, others=result.others), tensors) if is_true else None

    def has_sent(self, since: int, upto: int, digest: bytes) -> bool:
        """Whether the batches after one, up to another, have a digest."""
        batches = [encoded for sent, encoded in self._sent if since < sent <= upto]
        return len(batches) == upto - since and all(batches) and digest_of_batches(batches) == digest


_inboxes: WeakValueDictionary[str, EarlyInbox] = WeakValueDictionary()
"""The inboxes of this process, by the name of their session."""


def _is_true(assumed: Assumed) -> bool:
    """Whether this process has sent the batches that another session's answer assumes."""
    inbox = _inboxes.get(assumed.session)
    return inbox is not None and inbox.has_sent(assumed.since, assumed.upto, assumed.digest)
