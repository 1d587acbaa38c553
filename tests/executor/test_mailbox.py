"""Mailboxes: what waits where, who is held up, and when waiting ends."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from djinn.errors import PeerError, ProtocolError
from djinn.wire.messages import AliasedTensor, Failure, Plain, TensorHeader, ValueTransfer
from djinn_plugins.common.wire.assumptions import AheadNote, noted
from djinn_plugins.executor.mailbox import MAX_AHEAD_BYTES, MAX_SENDERS, InboxRegistry, Mailbox
from djinn_plugins.executor.transfers import check

SOON_S = 5.0
SHORT_S = 0.1


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made
        # A test that failed must not be waited for.
        for box in _boxes:
            box.close()
    _boxes.clear()


_boxes: list[Mailbox] = []


def mailbox(**options: Any) -> Mailbox:
    _boxes.append(Mailbox(**options))
    return _boxes[-1]


def number(transfer: int) -> ValueTransfer:
    return ValueTransfer(transfer, Plain(transfer))


def kibibytes(transfer: int, count: int) -> tuple[ValueTransfer, list[torch.Tensor]]:
    tensor = torch.zeros(count * 1024, dtype=torch.uint8)
    return ValueTransfer(transfer, TensorHeader("uint8", (count * 1024,), (1,))), [tensor]


def waits(future: Future[object]) -> bool:
    time.sleep(SHORT_S)
    return not future.done()


def test_a_transfer_is_taken_by_sender_and_number_in_any_order() -> None:
    box = mailbox()
    first, second = box.begin("a"), box.begin("b")
    box.put(first, number(1), [])
    box.put(second, ValueTransfer(1, Plain("other")), [])
    box.put(first, number(2), [])
    assert box.take("a", 2)[0] == number(2)
    assert box.take("b", 1)[0] == ValueTransfer(1, Plain("other"))
    assert box.take("a", 1)[0] == number(1)


def test_taking_waits_until_it_comes(pool: ThreadPoolExecutor) -> None:
    box = mailbox()
    delivery = box.begin("a")
    taken = pool.submit(box.take, "a", 5)
    box.put(delivery, number(4), [])
    assert waits(taken)
    box.put(delivery, number(5), [])
    assert taken.result(SOON_S)[0] == number(5)


def test_a_sender_that_is_ahead_is_held_up_until_something_is_taken(pool: ThreadPoolExecutor) -> None:
    box = mailbox(max_unclaimed_bytes=10 * 1024)
    delivery, other = box.begin("a"), box.begin("b")
    box.put(delivery, *kibibytes(1, 4))
    ahead = pool.submit(box.put, delivery, *kibibytes(2, 20))
    assert waits(ahead)
    box.put(other, *kibibytes(1, 4))
    box.take("a", 1)
    assert waits(ahead)
    box.take("a", 2)
    ahead.result(SOON_S)


def test_a_sender_is_not_held_up_while_its_receiver_waits(pool: ThreadPoolExecutor) -> None:
    """Otherwise a transfer that is taken out of turn, and sessions that send to each other, would wait for ever."""
    box = mailbox(max_unclaimed_bytes=1024)
    delivery = box.begin("a")
    taken = pool.submit(box.take, "a", 9)
    for transfer in range(10):
        pool.submit(box.put, delivery, *kibibytes(transfer, 4)).result(SOON_S)
    assert taken.result(SOON_S)[0].transfer == 9
    held_up = pool.submit(box.put, delivery, *kibibytes(10, 4))
    assert waits(held_up)
    with box.waiting():
        held_up.result(SOON_S)


def test_what_waits_has_a_limit_all_the_same() -> None:
    box = mailbox(max_unclaimed_bytes=1024, max_held_bytes=10 * 1024)
    delivery = box.begin("a")
    with box.waiting():
        box.put(delivery, *kibibytes(1, 4))
        with pytest.raises(ProtocolError, match="10240"):
            box.put(delivery, *kibibytes(2, 8))


def test_plain_values_count_as_well() -> None:
    box = mailbox(max_held_bytes=10 * 1024)
    with pytest.raises(ProtocolError, match="10240"):
        box.put(box.begin("a"), ValueTransfer(1, Plain("x" * 10_000)), [])


def test_a_transfer_that_comes_twice() -> None:
    box = mailbox()
    delivery = box.begin("a")
    box.put(delivery, number(1), [])
    with pytest.raises(ProtocolError, match="ValueTransfer 1 came twice"):
        box.put(delivery, ValueTransfer(1, Plain("forged")), [])
    assert box.take("a", 1)[0] == number(1)


def test_what_came_before_the_end_is_kept_and_nothing_more_is_waited_for(pool: ThreadPoolExecutor) -> None:
    box = mailbox()
    delivery = box.begin("a")
    taken = pool.submit(box.take, "a", 2)
    box.put(delivery, number(1), [])
    assert waits(taken)
    box.end(delivery, "the wire was cut")
    with pytest.raises(PeerError, match="the wire was cut"):
        taken.result(SOON_S)
    assert box.take("a", 1)[0] == number(1)


def test_a_sender_with_two_connections_and_one_that_comes_again(pool: ThreadPoolExecutor) -> None:
    box = mailbox()
    first, second = box.begin("a"), box.begin("a")
    taken = pool.submit(box.take, "a", 1)
    box.end(first, "over")
    assert waits(taken)
    box.end(second, "over")
    with pytest.raises(PeerError, match="over"):
        taken.result(SOON_S)
    third = box.begin("a")
    taken = pool.submit(box.take, "a", 1)
    assert waits(taken)
    box.put(third, number(1), [])
    assert taken.result(SOON_S)[0] == number(1)


def test_a_sender_that_never_comes() -> None:
    box = mailbox(absence_s=SHORT_S)
    box.begin("b")
    with pytest.raises(PeerError, match="has not connected"):
        box.take("a", 1)


def test_nobody_waits_for_a_client_that_has_left(pool: ThreadPoolExecutor) -> None:
    box = mailbox(max_unclaimed_bytes=1024)
    delivery = box.begin("a")
    gone = threading.Event()
    taken = pool.submit(box.take, "a", 9, gone.is_set)
    assert waits(taken)
    gone.set()
    with pytest.raises(PeerError, match="has left"):
        taken.result(SOON_S)
    left = threading.Event()
    held_up = pool.submit(box.put, delivery, *kibibytes(1, 4), left.is_set)
    assert waits(held_up)
    left.set()
    held_up.result(SOON_S)


@pytest.mark.parametrize("how", ["close", "end"])
def test_whoever_is_held_up_goes_on_when_there_is_nobody_to_wait_for(pool: ThreadPoolExecutor, how: str) -> None:
    box = mailbox(max_unclaimed_bytes=1024)
    delivery = box.begin("a")
    held_up = pool.submit(box.put, delivery, *kibibytes(1, 4))
    assert waits(held_up)
    if how == "close":
        box.close()
    else:
        box.end(delivery, "")
    held_up.result(SOON_S)


def test_closing_ends_everything(pool: ThreadPoolExecutor) -> None:
    closed: list[str] = []
    box = mailbox()
    delivery = box.begin("a", lambda: closed.append("a"))
    gone = box.begin("b", lambda: closed.append("b"))
    box.end(gone, "")
    taken = pool.submit(box.take, "a", 1)
    assert waits(taken)
    box.close()
    assert closed == ["a"]
    ended: list[Callable[[], object]] = [
        lambda: taken.result(SOON_S), lambda: box.take("a", 1), lambda: box.put(delivery, number(1), []),
        lambda: box.begin("c")]
    for action in ended:
        with pytest.raises(PeerError, match="ended"):
            action()
    box.close()


def test_senders_are_counted() -> None:
    box = mailbox()
    deliveries = [box.begin(str(index)) for index in range(MAX_SENDERS)]
    with pytest.raises(PeerError, match=str(MAX_SENDERS)):
        box.begin("one more")
    box.end(deliveries[0], "")
    box.begin("one more")


def test_a_room_finds_the_mailboxes_that_are_open() -> None:
    room = InboxRegistry()
    one, other = room.open(), room.open()
    assert one.key != other.key
    assert room.find(one.key) is one
    assert room.find(other.key) is other
    assert room.find(bytes(16)) is None
    assert room.find(one.key[:15]) is None
    room.remove(one)
    assert room.find(one.key) is None
    room.close()
    assert room.find(other.key) is None
    with pytest.raises(PeerError):
        other.begin("a")


def ahead(transfer: int, value: int) -> ValueTransfer:
    return noted(ValueTransfer(transfer, Plain(value)), AheadNote("value"))


def requested(transfer: int) -> ValueTransfer:
    return noted(ValueTransfer(transfer), AheadNote("requested"))


def test_what_was_sent_ahead_is_seen_and_taken_only_once_it_is_requested(pool: ThreadPoolExecutor) -> None:
    box = mailbox()
    sender = box.begin("a")
    box.put(sender, ahead(1, 5), [])
    seen = box.peek("a", 1)
    assert seen is not None
    assert (seen[0].item, seen[2]) == (Plain(5), False)
    taken = pool.submit(box.take, "a", 1)
    assert waits(taken)
    box.put(sender, requested(1), [])
    assert taken.result(SOON_S)[0].item is seen[0].item
    assert box.held_bytes == 0


def test_what_was_sent_ahead_is_replaced_by_what_is_sent_on_request() -> None:
    box = mailbox()
    sender = box.begin("a")
    box.put(sender, ahead(1, 5), [])
    box.put(sender, number(1), [])
    assert box.take("a", 1)[0] == number(1)
    assert box.peek("a", 1) is None


def test_what_is_void_is_gone_and_cannot_be_requested() -> None:
    box = mailbox()
    sender, other = box.begin("a"), box.begin("b")
    box.put(sender, ahead(1, 5), [])
    box.put(other, ahead(1, 6), [])
    box.put(sender, noted(ValueTransfer(1), AheadNote("void")), [])
    assert box.peek("a", 1) is None
    assert box.peek("b", 1) is not None
    with pytest.raises(ProtocolError, match="was not sent ahead"):
        box.put(sender, requested(1), [])
    box.end(other, "it has ended")
    assert box.peek("b", 1) is None
    assert box.held_bytes == 0


def test_more_than_a_bound_cannot_be_sent_ahead() -> None:
    box = mailbox()
    sender = box.begin("a")
    transfer, tensors = kibibytes(1, MAX_AHEAD_BYTES // 1024)
    with pytest.raises(ProtocolError, match="sent ahead"):
        box.put(sender, noted(transfer, AheadNote("value")), tensors)


@pytest.mark.parametrize("more", [
    {"told": (Failure(1, "ValueError", "x" * 10_000, source="a"),) * 10}, {"members": (AliasedTensor(),) * 10_000},
    {"item": Plain([[]] * 10_000)}], ids=["failures", "members", "lists"])
def test_all_that_a_transfer_brings_is_counted(more: dict[str, Any]) -> None:
    box = mailbox()
    transfer, tensors = kibibytes(1, 1)
    box.put(box.begin("a"), msgspec.structs.replace(transfer, **more), [] if "item" in more else tensors)
    assert box.held_bytes > 500_000


@pytest.mark.parametrize("note", [b"\x00", b"\x91\xa1x", b"\xff" * 16])
def test_an_invalid_note_is_refused(note: bytes) -> None:
    with pytest.raises(ProtocolError, match="invalid note"):
        check(ValueTransfer(1, Plain(1), ahead=note))


def test_only_a_value_is_sent_ahead() -> None:
    for transfer in (ValueTransfer(1), ValueTransfer(1, Plain(1), members=(AliasedTensor(),))):
        with pytest.raises(ProtocolError, match="Only a value"):
            check(noted(transfer, AheadNote("value")))


def test_a_descriptor_is_readable_when_something_was_sent_ahead() -> None:
    box = mailbox()
    sender, bell = box.begin("a"), box.bell()
    box.put(sender, number(1), [])
    assert not select.select([bell], [], [], 0)[0]
    box.put(sender, ahead(2, 5), [])
    assert select.select([bell], [], [], SOON_S)[0]
    box.hush()
    assert not select.select([bell], [], [], 0)[0]
    box.close()
    assert box.bell() == -1
