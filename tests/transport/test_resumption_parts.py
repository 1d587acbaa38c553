"""Resumption without a network: both ends, and everything that may happen between them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest

from djinn.errors import ProtocolError
from djinn_plugins.transport.resumption import (
    ACK_BATCHES,
    ACK_BYTES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_BUFFERED_BYTES,
    MAX_DIGESTS,
    NOBODY_S,
    ClientEnd,
    Patience,
    ServerEnd,
)

LEASE_S = 30.0
GREETING = 1
SELDOM = st.sampled_from([False, False, False, False, True])


def test_another_batch_under_the_same_number_is_an_error() -> None:
    end: ServerEnd[None] = ServerEnd(GREETING, LEASE_S)
    assert end.take(2, 7)
    assert not end.ack_due
    assert not end.take(2, 7)
    assert end.ack_due, "or a client would wait that was told before it had come"
    with pytest.raises(ProtocolError, match="Batch 2 comes again, and is another"):
        end.take(2, 8)


def test_a_number_that_skips_is_an_error() -> None:
    end: ServerEnd[None] = ServerEnd(GREETING, LEASE_S)
    with pytest.raises(ProtocolError, match="Batch 3 follows batch 1"):
        end.take(3, 7)
    assert end.take(2, 7)


def test_the_number_of_the_greeting_is_no_batchs() -> None:
    end: ServerEnd[None] = ServerEnd(GREETING, LEASE_S)
    with pytest.raises(ProtocolError, match="of before the first batch"):
        end.take(GREETING, 7)
    assert end.take(2, 7)


def test_what_is_too_old_to_be_compared_is_not_carried_out_either() -> None:
    end: ServerEnd[None] = ServerEnd(GREETING, LEASE_S)
    for number in range(2, MAX_DIGESTS + 10):
        assert end.take(number, number)
    assert not end.take(2, 99)
    with pytest.raises(ProtocolError):
        end.take(MAX_DIGESTS, 99)


def test_the_client_is_told_seldom_and_of_what_is_large_at_once() -> None:
    end: ServerEnd[None] = ServerEnd(GREETING, LEASE_S)
    number = GREETING
    for number in range(2, ACK_BATCHES + 1):
        end.take(number, 0, 100)
        assert not end.ack_due
    end.take(number + 1, 0, 100)
    assert end.ack_due
    assert end.acked() == number + 1
    assert not end.ack_due
    end.take(number + 2, 0, MAX_BUFFERED_BYTES + 1)
    assert end.ack_due


def test_an_answer_tells_it_as_well() -> None:
    end: ServerEnd[str] = ServerEnd(GREETING, LEASE_S)
    for number in range(2, ACK_BATCHES + 1):
        end.take(number, 0)
    end.finish(ACK_BATCHES, "answer")
    end.delivered()
    end.take(ACK_BATCHES + 1, 0)
    assert not end.ack_due


def test_the_lease_begins_when_the_first_sign_is_noticed_and_ends_in_time() -> None:
    end: ServerEnd[None] = ServerEnd(GREETING, LEASE_S)
    assert end.left_s(1e9) == float("inf")
    end.lost(100.0)
    end.lost(120.0)
    assert end.left_s(129.0) == pytest.approx(1.0)
    end.found(GREETING)
    assert end.left_s(1e9) == float("inf")


def test_a_batch_that_an_interrupt_has_overtaken_does_not_tell_that_answers_have_arrived() -> None:
    end: ServerEnd[str] = ServerEnd(GREETING, LEASE_S)
    for number in (2, 3):
        end.take(number, 0, is_cancelled=number == 3)
        end.finish(number, f"answer {number}")
        end.delivered()
    end.lost(0.0)
    end.found(GREETING)
    assert end.to_give() == (2, "answer 2")
    end.delivered()
    assert end.to_give() == (3, "answer 3")
    end.delivered()
    end.take(4, 0)
    assert not end.holds_answer


@pytest.mark.parametrize("answered", [0, 4])
def test_a_client_that_has_what_was_never_given_cannot_go_on(answered: int) -> None:
    end: ServerEnd[str] = ServerEnd(GREETING, LEASE_S)
    for number in (2, 3):
        end.take(number, 0)
        end.finish(number, "answer")
    with pytest.raises(ProtocolError):
        end.check(answered)
    end.check(2)
    end.found(2)
    assert end.to_give() == (3, "answer")
    end.found(3)
    assert end.to_give() is None


def test_a_server_that_has_what_was_never_sent_cannot_be_gone_on_with() -> None:
    end: ClientEnd[str] = ClientEnd(GREETING, 0)
    end.send("a", 1)
    end.send("b", 1)
    with pytest.raises(ProtocolError):
        end.lacking(4)
    assert end.lacking(2) == ["b"]
    with pytest.raises(ProtocolError):
        end.lacking(1)
    with pytest.raises(ProtocolError):
        end.acknowledged(9)
    with pytest.raises(ProtocolError):
        end.answer(9)


def test_what_belongs_to_the_caller_again_is_not_sent_again() -> None:
    end: ClientEnd[str] = ClientEnd(GREETING, 0)
    end.send("a", 1)
    end.send("borrowed", 1, is_borrowed=True)
    assert end.lacking(1) == ["a", "borrowed"]
    end.give_back()
    with pytest.raises(ProtocolError, match="interrupted"):
        end.lacking(1)


def test_copies_are_let_go_of_once_and_borrowed_memory_never() -> None:
    released: list[str] = []
    end: ClientEnd[str] = ClientEnd(GREETING, 0, released.append)
    for frame, is_borrowed in (("a", False), ("b", True), ("c", False)):
        end.send(frame, 5, is_borrowed=is_borrowed)
    end.acknowledged(3)
    end.answer(4)
    end.acknowledged(4)
    assert released == ["a", "c"]
    assert (end.kept_bytes, end.copied_bytes, end.kept) == (0, 0, 0)


def test_a_small_limit_leaves_room_for_what_is_not_told_yet() -> None:
    """Or a client would wait for what the server is not going to say."""
    end: ClientEnd[str] = ClientEnd(GREETING, 0)
    end.send("a", 2 * ACK_BYTES)
    assert not end.is_full
    end.send("b", 3 * ACK_BYTES)
    assert end.is_full


def test_attempts_come_at_growing_distances_until_the_lease_is_over() -> None:
    patience = Patience(100.0, LEASE_S, lambda: 1.0)
    now, pauses = 100.0, []
    while (pause_s := patience.pause_s(now)) is not None:
        assert patience.attempt_s(now) > 0
        pauses.append(pause_s)
        now += pause_s
    assert pauses[0] == FIRST_PAUSE_S
    assert max(pauses) == LONGEST_PAUSE_S
    assert now == pytest.approx(100.0 + LEASE_S)
    assert patience.attempt_s(now) <= 0


def test_where_nobody_listens_it_is_soon_tried_no_more() -> None:
    patience = Patience(0.0, LEASE_S, lambda: 0.0)
    assert patience.pause_s(5.0, is_refused=True) is not None
    assert patience.pause_s(5.5) is not None
    assert patience.pause_s(6.2, is_refused=True) is not None
    assert patience.pause_s(6.2 + NOBODY_S, is_refused=True) is None
