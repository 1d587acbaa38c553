"""Values that sessions send each other ahead of requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from djinn.wire.messages import Receive, Send, ValueTransfer
from djinn_plugins.common.wire.assumptions import MAX_ASSUMED, Assumed, merged
from djinn_plugins.executor import transfers
from djinn_plugins.executor.mailbox import Mailbox
from djinn_plugins.executor.peer_exchange import LocalPeer, PeerExchange
from djinn_plugins.executor.peers_ahead import MAX_VALUE_BYTES, PeersAhead

Pair = tuple[PeersAhead, PeersAhead]


def _unpacked(transfer: ValueTransfer, tensor: torch.Tensor | None) -> Any:
    assert tensor is not None
    return transfers.unpack(transfer, tensor, torch.Tensor.clone)


@pytest.fixture
def pair() -> Pair:
    """Two sessions that know each other as peer 0."""
    boxes = {name: Mailbox() for name in "ab"}
    made: list[PeersAhead] = []
    for name, other in ("ab", "ba"):
        box, target = boxes[name], boxes[other]
        post = PeerExchange(name, box, lambda _, hello, target=target: LocalPeer(target, hello.session))
        post.connect(0, other, target.key)
        made.append(PeersAhead(post, _unpacked, lambda value: value))
    return made[0], made[1]


def _assumed(session: str, epoch: int = 0, since: int = 1, upto: int = 2) -> Assumed:
    return Assumed(session, epoch, since, upto, b"digest")


def test_a_value_that_was_sent_ahead_is_seen_with_what_it_assumes_until_it_is_withdrawn(pair: Pair) -> None:
    here, there = pair
    here.send(Send(7, 0, 1), torch.ones(3), [_assumed("a"), _assumed("c")])
    found = there.look(Receive(7, 1, "a"))
    assert found is not None
    assert torch.equal(found.outputs[0], torch.ones(3))
    assert found.assumes == (_assumed("a"), _assumed("c"))
    assert there.is_valid(found)
    here.withdraw()
    assert not there.is_valid(found)
    assert there.look(Receive(7, 1, "a")) is None
    assert not here.is_sent(Send(7, 0, 1))


def test_what_was_computed_from_a_withdrawn_value_is_not_used_by_its_origin(pair: Pair) -> None:
    here, there = pair
    here.send(Send(7, 0, 1), torch.ones(3), [_assumed("a")])
    there.send(Send(8, 0, 2), torch.ones(3), [_assumed("b"), _assumed("a")])
    found = here.look(Receive(8, 2, "b"))
    assert found is not None
    # What it assumes of its origin, that knows itself.
    assert found.assumes == (_assumed("b"),)
    here.withdraw()
    assert here.look(Receive(8, 2, "b")) is None


def test_what_is_withdrawn_once_is_not_withdrawn_again(pair: Pair) -> None:
    here, _ = pair
    here.withdraw()
    assert here.epoch == 0
    here.send(Send(7, 0, 1), torch.ones(3), [_assumed("a")])
    here.withdraw()
    here.withdraw()
    assert here.epoch == 1


@pytest.mark.parametrize(("count", "size"), [(1, MAX_VALUE_BYTES // 4 + 1), (5, MAX_VALUE_BYTES // 4)])
def test_much_is_not_sent_ahead(pair: Pair, count: int, size: int) -> None:
    assert not pair[0].can_send([torch.empty(size)] * count)


def test_what_depends_on_too_much_is_not_sent_ahead(pair: Pair) -> None:
    here, there = pair
    here.send(Send(7, 0, 1), torch.ones(3), [_assumed(str(count)) for count in range(MAX_ASSUMED + 1)])
    assert there.look(Receive(7, 1, "a")) is None
    assert here.sent == 0


def test_of_the_assumptions_of_one_epoch_the_last_one_contains_the_others() -> None:
    later, other = _assumed("a", 0, 1, 5), _assumed("a", 1, 1, 3)
    assert merged([_assumed("a"), later, other, _assumed("b")]) == (later, other, _assumed("b"))
    assert merged([later, _assumed("a")]) == (later,)
