"""Early answers: a server that runs ahead of a loop sends what the loop will ask for before it is asked.

These are values, and metadata of values whose size depends on data.

The server predicts the next batches of a client, to the byte, from batches that followed each other before. If all
programs of such a batch have run ahead, it knows the answer, and sends it under the batch's number, with the digest of
all batches that it assumes up to that one. The client uses the answer only if those that it has itself sent are the
same: then the value is a function of its own messages. It sends every batch anyway, and the server makes the same
comparison; so both know, without another message, whether a batch is answered. After the first batch that differs, all
early answers are void on both sides.

A value that depends on what another session has sent ahead also assumes that session's batches; see
`djinn_plugins.common.wire.assumptions`. Of these, only the client knows whether they are those that it sent. So such a
batch is answered once more when it arrives, and the client ignores that answer if it has used the early one.

Nothing else changes: an answer that assumes anything else is ignored, and the client waits as it does without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from djinn.ir.phase import ExecutionPhase
from djinn.wire import messages
from djinn.wire.messages import Batch, Free, Item, Plain, Poisoned, Receive, Result, Run, RunDelta, Send
from djinn.wire.tensors import copied, header_of
from djinn_plugins.common.memory.tensor_bytes import metadata_of
from djinn_plugins.common.wire.assumptions import (
    MAX_ASSUMED,
    MAX_EARLY,
    MAX_EARLY_BYTES,
    MAX_SENT,
    Assumed,
    digest_of_batches,
    encode_assumed,
    plain_bytes,
)
from djinn_plugins.common.wire.short_messages import encode
from djinn_plugins.executor.peers_ahead import PeersAhead
from djinn_plugins.executor.speculation import CONFIDENT, MOST_CONFIDENT, RunAhead, Speculator

__all__ = ("EarlyAnswers", "EarlyChannel")

MAX_VALUE_BYTES = 4096
"""Largest value that is sent early."""
MAX_DESCRIBED = 16
"""Most values of a batch whose metadata is sent early."""
_Place = tuple[int, int]
_Programs = tuple[int, ...]


@attrs.frozen
class _Form:
    """The form of a batch that can be predicted.

    Attributes:
        programs: Its programs and exchanges with other sessions.
        fetched: Where the values are computed that it fetches: a run back from its end, and one of the results.
        described: The same of the values whose metadata it asks for.
        phase: The phase that it announces.
    """

    programs: _Programs
    fetched: tuple[_Place, ...]
    described: tuple[_Place, ...]
    phase: ExecutionPhase | None


class EarlyChannel(Protocol):
    """What sends early answers to a client."""

    @property
    def is_clear(self) -> bool:
        """Whether a small message can be sent without waiting."""

    def send_early(self, sequence: int, message: Result, tensors: Sequence[torch.Tensor]) -> bool:
        """Send an early answer; return whether it was sent."""


@attrs.frozen
class _Expected:
    """A batch that is expected.

    Attributes:
        batch: The batch.
        encoded: The same, encoded.
        form: Its form.
        answer: The answer that was sent, if it asks for something.
        size_bytes: Bytes of the answer's values.
    """

    batch: Batch
    encoded: bytes
    form: _Form
    answer: tuple[Result, list[torch.Tensor]] | None
    size_bytes: int


class EarlyAnswers:
    """The server's side: predicts batches, and answers them.

    Args:
        ahead: The runs ahead.
        channel: Sends answers.
        value_of: Returns the value of a handle on the device; ``None`` if there is none.
        read: Copies a tensor to the host; the result may share the tensor's memory.
        is_quiet: Whether an answer would now contain nothing but values: no failures, warnings or timings.
        take_run_ns: Returns how long programs ran since the last answer.
        abroad: Sends values to other sessions; ``None`` if that is impossible.
        may_shed: Whether runs ahead are dropped when memory is short. Then only runs that can be repeated bit for bit
            give values early.

    Attributes:
        sent: Answers that were sent early.
        used: Those of them that the client has asked for.

    Concurrency:
        One thread at a time.
    """

    def __init__(
        self, ahead: Speculator, channel: EarlyChannel, value_of: Callable[[int], Any],
        read: Callable[[torch.Tensor], torch.Tensor], is_quiet: Callable[[], bool], take_run_ns: Callable[[], int],
        abroad: PeersAhead | None = None, *, may_shed: bool = False,
    ) -> None:
        self._ahead = ahead
        self._channel = channel
        self._value_of = value_of
        self._read = read
        self._is_quiet = is_quiet
        self._take_run_ns = take_run_ns
        self._abroad = abroad
        self._may_shed = may_shed
        # The first batch of a round often has data, so that it cannot be predicted; its programs tell what follows.
        self._followers: dict[_Form | _Programs, tuple[_Form, int]] = {}
        self._last: _Form | _Programs | None = None
        self._received = 0
        self._expected: deque[_Expected] = deque()
        self.sent = self.used = 0
        ahead.is_repeating = True

    def begin(self, number: int, batch: Batch) -> tuple[Result, list[torch.Tensor]] | None:
        """Compare a batch, before it is executed, with the expected one.

        Returns:
            The answer that it was given early, if that is certain. Otherwise, it has to be answered again.
        """
        self._received = number
        self._ahead.steps.clear()
        if not self._expected:
            return None
        first = self._expected.popleft()
        if batch != first.batch:
            self._expected.clear()
            self._ahead.pinned = 0
            return None
        self.used += first.answer is not None
        # Whether other sessions have received what it assumes of them is known to the client only.
        return None if first.answer is None or first.answer[0].others else first.answer

    def end(self, batch: Batch) -> None:
        """Learn from a batch that was executed."""
        form = self._form_of(batch)
        if form is not None and self._last is not None:
            follower, times = self._followers.get(self._last, (form, 0))
            if follower == form:
                times = min(times + 1, MOST_CONFIDENT)
            elif times < 2 * CONFIDENT:
                follower, times = form, 0
            else:
                times -= CONFIDENT
            self._followers[self._last] = follower, times
            if len(self._followers) > MAX_SENT:
                self._followers.clear()
        self._last = tuple([step for step in self._ahead.steps if step > 0]) if form is None else form

    def give(self) -> None:
        """Answer the batches early whose programs have all run ahead by now."""
        while self._give_next():
            pass

    def _form_of(self, batch: Batch) -> _Form | None:
        """Return the form of a batch; ``None`` if it cannot be predicted."""
        if any((batch.timed, batch.metered, batch.settled, batch.later)) or not all(
                isinstance(command, (Run, RunDelta, Send, Receive, Free)) for command in batch.commands):
            return None
        if 0 in self._ahead.steps:
            return None
        if (batch.synchronize and not batch.describe) or len(batch.describe) > MAX_DESCRIBED:
            return None
        fetched, described = (tuple([place for handle in handles if (place := self._ahead.place_of(handle))])
                              for handles in (batch.fetch, batch.describe))
        if len(fetched) < len(batch.fetch) or len(described) < len(batch.describe):
            return None
        return _Form(tuple(self._ahead.steps), fetched, described, batch.phase)

    def _give_next(self) -> bool:
        """Predict one more batch, and answer it if it asks for something; return whether that was possible."""
        last = self._expected[-1].form if self._expected else self._last
        form, times = (None, 0) if last is None else self._followers.get(last, (None, 0))
        covered = sum(len(expected.batch.commands) for expected in self._expected)
        if form is None or times < CONFIDENT or covered != self._ahead.pinned or len(self._expected) >= MAX_EARLY:
            return False
        end = covered + len(form.programs)
        runs = self._ahead.runs(covered, len(form.programs))
        if tuple([ahead.run.program for ahead in runs]) != form.programs or not (form.programs or _programs_of(last)):
            # A client that asks again and again without any work does not need to be fast.
            return False
        if self._may_shed and not all(ahead.repeats for ahead in runs):
            return False
        sends, predicted = self._sends(runs, covered), self._predict(form, end, runs)
        if predicted is None or sends is None:
            return False
        batch, items, tensors = predicted
        encoded = encode(batch)
        answer = self._send(encoded, items, tensors, end) if items else None
        if items and answer is None:
            return False
        self._expected.append(_Expected(batch, encoded, form, answer, sum(tensor.nbytes for tensor in tensors)))
        self._ahead.pinned = end
        self._send_abroad(sends, end)
        return True

    def _sends(self, runs: Sequence[RunAhead], start: int) -> list[tuple[Send, Any]] | None:
        """Return the values that go to other sessions, as they are then; ``None`` if they cannot be sent ahead."""
        sends: list[tuple[Send, Any]] = []
        for index, ahead in enumerate(runs, start + 1):
            if isinstance(ahead.exchange, Send):
                values = self._ahead.values((ahead.exchange.handle,), self._value_of)
                if values is None or self._ahead.is_written_after(values[0], index):
                    return None
                sends.append((ahead.exchange, values[0]))
        if sends and (self._abroad is None or not self._is_quiet() or not self._abroad.can_send(
                [value for _, value in sends])):
            return None
        return sends

    def _send_abroad(self, sends: Sequence[tuple[Send, Any]], end: int) -> None:
        """Send values to other sessions, which assume the expected batches."""
        if not sends or self._abroad is None:
            return
        digest = digest_of_batches(expected.encoded for expected in self._expected)
        own = Assumed(self._abroad.session, self._abroad.epoch, self._received, self._received + len(self._expected),
                      digest)
        for command, value in sends:
            self._abroad.send(command, value, (own, *self._ahead.assumed(end)))

    def _predict(
        self, form: _Form, end: int, runs: Sequence[RunAhead],
    ) -> tuple[Batch, list[Item], list[torch.Tensor]] | None:
        """Return the batch of a form after ``end`` runs ahead, what answers it, and the tensors of that."""
        fetched, described = ([found for place in places if (found := self._ahead.output_at(*place, end))]
                              for places in (form.fetched, form.described))
        if len(fetched) < len(form.fetched) or len(described) < len(form.described):
            return None
        values, metadata = self._values(fetched, end), self._values(described, end)
        if values is None or metadata is None or any(
                isinstance(value, torch.Tensor) and value.nbytes > MAX_VALUE_BYTES for value in values):
            return None
        tensors = [copied(self._read(value)) for value in values if isinstance(value, torch.Tensor)]
        headers = map(header_of, tensors)
        items: list[Item] = [next(headers) if isinstance(value, torch.Tensor) else Plain(messages.to_wire(value))
                             for value in values]
        items += map(metadata_of, metadata)
        if sum(map(plain_bytes, items)) > MAX_VALUE_BYTES:
            return None
        batch = Batch(
            [ahead.command for ahead in runs], tuple([handle for handle, _ in fetched]),
            tuple([handle for handle, _ in described]), synchronize=bool(described), phase=form.phase)
        return batch, items, tensors

    def _values(self, found: Sequence[tuple[int, Any]], end: int) -> list[Any] | None:
        """Return values as they are after ``end`` runs ahead.

        Returns:
            ``None`` if there is none, or if one was written by a later run or has no strides.
        """
        values: list[Any] = []
        for handle, ahead in found:
            value = self._value_of(handle) if ahead is None else ahead
            if value is None or isinstance(value, Poisoned) or self._ahead.is_written_after(value, end):
                return None
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                # No answer can hold it; the question is answered with an error.
                return None
            values.append(value)
        return values

    def _send(
        self, encoded: bytes, items: Sequence[Item], tensors: list[torch.Tensor], end: int,
    ) -> tuple[Result, list[torch.Tensor]] | None:
        """Send the answer to a batch, unless it would contain more than values, or is too much."""
        size_bytes = sum(expected.size_bytes for expected in self._expected) + sum(tensor.nbytes for tensor in tensors)
        if size_bytes > MAX_EARLY_BYTES or not self._is_quiet() or not self._channel.is_clear:
            return None
        assumed = self._ahead.assumed(end)
        if len(assumed) > MAX_ASSUMED:
            return None
        batches = [*(expected.encoded for expected in self._expected), encoded]
        result = Result(tuple(items), run_ns=self._take_run_ns(),
                        assumes=digest_of_batches(batches), since=self._received,
                        others=encode_assumed(assumed))
        if not self._channel.send_early(self._received + len(batches), result, tensors):
            return None
        self.sent += 1
        return result, tensors


def _programs_of(known: _Form | _Programs | None) -> _Programs:
    return known.programs if isinstance(known, _Form) else known or ()
