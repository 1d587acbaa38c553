"""Two sessions of one process that exchange values: peers, transfers, timings and accounts of a service."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.errors import PeerError, ProtocolError
from djinn.ir.program import NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import (
    AliasedTensor,
    Batch,
    Define,
    Failure,
    Forget,
    Free,
    Peer,
    PeerHello,
    Poisoned,
    Receive,
    Result,
    Run,
    RunDelta,
    Seed,
    Send,
    TensorHeader,
    Upload,
    ValueTransfer,
    decode,
    encode,
)
from djinn.wire.tensors import header_of
from djinn_plugins.executor import reports, timings
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.mailbox import InboxRegistry
from djinn_plugins.executor.peer_exchange import LocalPeer, PeerExchange
from djinn_plugins.executor.service import SessionService
from djinn_plugins.executor.transfers import check, pack_family, unpack_family

aten = torch.ops.aten
TENSOR = TensorArgument()


def one_step(operator: torch._ops.OpOverload, *arguments: Any, results: int = 1) -> Program:
    facts = facts_of(operator)
    inputs = sum(argument is TENSOR for argument in arguments)
    return Program((Template(facts.name, facts.digest, arguments),),
                   (Step(0, tuple(-1 - index for index in range(inputs)), results),), inputs, tuple(range(results)))


ADD, TRANSPOSE, ITEM, GROW = 1, 2, 3, 4
DEFINITIONS = [
    Define(ADD, one_step(aten.add.Tensor, TENSOR, TENSOR)), Define(TRANSPOSE, one_step(aten.t.default, TENSOR)),
    Define(ITEM, one_step(aten._local_scalar_dense.default, TENSOR)),
    Define(GROW, one_step(aten.mul_.Scalar, TENSOR, NumberArgument(), results=0)),
]


@st.composite
def places(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Size, stride and offset of something within 24 elements."""
    size = draw(st.lists(st.integers(0, 3), max_size=3))
    stride = [draw(st.integers(0, 4)) for _ in size]
    reach = sum(max(0, extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return size, stride, draw(st.integers(0, 23 - reach))


@attrs.define
class Side:
    """A session with a mailbox."""

    name: str
    room: InboxRegistry
    service: SessionService = attrs.field(init=False)
    key: bytes = attrs.field(init=False)
    post: PeerExchange = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        mailbox = self.room.open()
        self.key = mailbox.key
        self.post = PeerExchange(self.name, mailbox, self._carry)
        self.service = SessionService(CpuExecutor(), travels=True, post=self.post)
        self.ask(DEFINITIONS)

    def _carry(self, address: str, peer: PeerHello) -> LocalPeer:
        mailbox = self.room.find(peer.mailbox)
        if mailbox is None:
            raise PeerError(f"{address} is nowhere.")
        return LocalPeer(mailbox, peer.session)

    def ask(
        self, commands: Sequence[Any], tensors: Sequence[torch.Tensor] = (), fetch: tuple[int, ...] = (),
        *, timed: bool = False,
    ) -> tuple[Result, list[torch.Tensor]]:
        batch = Batch(list(commands), fetch=fetch, synchronize=True, timed=timed)
        result, data = self.service.handle(batch, [tensor.clone() for tensor in tensors])
        return result, [tensor.clone() for tensor in data]

    def upload(self, handle: int, tensor: torch.Tensor) -> None:
        assert self.ask([Upload(handle, header_of(tensor))], [tensor])[0].failures == ()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    room = InboxRegistry()
    here, there = Side("here", room), Side("there", room)
    here.ask([Peer(1, "local", there.key)])
    there.ask([Peer(1, "local", here.key)])
    yield here, there
    here.post.close()
    there.post.close()
    room.close()


def kinds(result: Result) -> list[str]:
    return [failure.kind for failure in result.failures]


def test_a_view_arrives_with_its_strides_and_is_not_the_senders(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.arange(6.0).view(2, 3))
    here.ask([Run(TRANSPOSE, (1,), [], (2,)), Send(2, 1, 1), Run(GROW, (1,), [10.0], ())])
    result, [got] = there.ask([Receive(5, 1, "here")], fetch=(5,))
    assert result.failures == ()
    assert torch.equal(got, torch.arange(6.0).view(2, 3).t())
    assert got.stride() == (1, 3)


def test_a_number_is_sent_and_used(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.tensor(7))
    here.ask([Run(ITEM, (1,), [], (2,)), Send(2, 1, 1)])
    result, _ = there.ask([Receive(5, 1, "here")], fetch=(5,))
    [item] = result.items
    assert getattr(item, "value", None) == 7


def test_the_generator_goes_over(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.ask([Seed(42), Send(0, 1, 1)])
    _, [wanted] = here.ask([], fetch=(0,))
    _, [before] = there.ask([], fetch=(0,))
    result, [got] = there.ask([Receive(0, 1, "here")], fetch=(0,))
    assert result.failures == ()
    assert torch.equal(got, wanted)
    assert not torch.equal(before, wanted)


def test_nonsense_for_the_generator_fails_and_changes_nothing(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.ones(3))
    here.ask([Send(1, 1, 1), Send(99, 1, 2)])
    _, [before] = there.ask([], fetch=(0,))
    result, [after] = there.ask([Receive(0, 1, "here"), Receive(0, 2, "here")], fetch=(0,))
    assert kinds(result) == ["TypeError", "UnknownHandleError"]
    assert torch.equal(before, after)


def test_a_family_shares_memory_at_the_other_end_too(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.arange(6.0).view(2, 3))
    here.ask([Run(TRANSPOSE, (1,), [], (2,)), Send(2, 1, 1, (1, 2))])
    result, [whole, view] = there.ask(
        [Receive(2, 1, "here", (1, 2)), Run(GROW, (1,), [2.0], ())], fetch=(1, 2))
    assert result.failures == ()
    assert torch.equal(whole, 2 * torch.arange(6.0).view(2, 3))
    assert torch.equal(view, whole.t())
    assert there.service.held_bytes == 24


@given(st.data())
def test_any_views_of_one_memory_arrive_as_they_were(data: st.DataObject) -> None:
    base = torch.arange(24, dtype=torch.int16)
    views = [base.as_strided(*data.draw(places())) for _ in range(data.draw(st.integers(1, 4)))]
    if data.draw(st.booleans()):
        views.append(base.view(torch.uint8))
    transfer, [flat] = pack_family(1, views, torch.clone)
    check(decode(encode(transfer)))
    made = unpack_family(decode(encode(transfer)), flat, torch.clone)
    for mine, wanted in zip(made, views, strict=True):
        assert torch.equal(mine, wanted)
        assert (mine.stride(), mine.storage_offset(), mine.dtype) == (
            wanted.stride(), wanted.storage_offset(), wanted.dtype)
    made[0].zero_()
    views[0].zero_()
    assert all(map(torch.equal, made, views))


def test_an_empty_view_that_begins_behind_the_end_travels() -> None:
    views = [torch.view_as_real(torch.empty(0, dtype=torch.complex64))[:, 1]]
    assert views[0].storage_offset() > views[0].untyped_storage().nbytes()
    transfer, [flat] = pack_family(1, views, torch.clone)
    check(transfer)
    [made] = unpack_family(transfer, flat, torch.clone)
    assert isinstance(made, torch.Tensor)
    assert (made.size(), made.stride(), made.storage_offset()) == ((0,), (2,), 1)


def test_conjugation_travels_with_a_family() -> None:
    base = torch.tensor([1 + 2j, 3 - 1j])
    transfer, [flat] = pack_family(1, [base, base.conj(), base.imag._neg_view()], torch.clone)
    made = unpack_family(transfer, flat, torch.clone)
    assert [mine.tolist() for mine in made] == [base.tolist(), base.conj().tolist(), [-2.0, 1.0]]


def test_a_member_that_failed_fails_alone(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.ones(3))
    here.ask([Send(1, 1, 1, (1, 99))])
    result, [got] = there.ask([Receive(1, 1, "here", (1, 99))], fetch=(1, 99))
    assert torch.equal(got, torch.ones(3))
    assert kinds(result) == ["UnknownHandleError"]
    assert isinstance(result.items[1], Poisoned)


def test_another_number_of_values_than_was_sent_is_refused(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.ones(3))
    here.ask([Send(1, 1, 1, (1,)), Send(1, 1, 2)])
    result, _ = there.ask([Receive(5, 1, "here", (5, 6)), Receive(7, 2, "here", (7, 8))], fetch=(5, 6, 7, 8))
    assert kinds(result) == ["ProtocolError", "ProtocolError"]
    assert all(isinstance(item, Poisoned) for item in result.items)


@pytest.mark.parametrize("member", [
    AliasedTensor("float32", (4,), (1,), 0), AliasedTensor("float32", (2,), (2**62,), 0),
    AliasedTensor("uint8", (1,), (1,), 12), AliasedTensor("int64", (2,), (1,), 0),
    AliasedTensor("uint8", (2, 2), (1,), 0), AliasedTensor("uint8", (2**62, 4), (0, 0), 2**62),
    AliasedTensor("int64", (0,), (1,), 2**62),
])
def test_members_beyond_their_memory_are_refused(member: AliasedTensor) -> None:
    with pytest.raises(ProtocolError):
        check(ValueTransfer(1, TensorHeader("uint8", (12,), (1,)), members=(member,)))


def test_what_failed_before_is_told_with_any_value(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.ones(2))
    here.service.handle(Batch([Run(98, (), [], (3,)), Send(1, 1, 1)]), [])
    result, [got] = there.ask([Receive(5, 1, "here")], fetch=(5,))
    assert torch.equal(got, torch.ones(2))
    [failure] = result.failures
    assert (failure.kind, failure.source) == ("ProtocolError", "here")


def test_a_failure_travels_and_is_told_once_with_where_it_was(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.ones(2))
    here.upload(2, torch.ones(3))
    first, _ = here.ask([Run(ADD, (1, 2), [], (3,)), Run(ADD, (3, 1), [], (4,)), Send(3, 1, 1)])
    again, _ = here.ask([Send(4, 1, 2)])
    [original] = first.failures
    assert again.failures == ()
    result, _ = there.ask([Receive(5, 1, "here"), Receive(6, 2, "here"), Run(ADD, (5, 6), [], (7,))], fetch=(5, 6, 7))
    [told] = result.failures
    assert told == Failure(1, original.kind, original.message, original.operator, original.run, original.step, "here",
                           original.identity)
    assert result.items == (Poisoned(1),) * 3


def test_a_failure_keeps_its_origin_over_several_sessions(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.ask([Send(99, 1, 1)])
    there.ask([Receive(5, 1, "here"), Send(5, 1, 1)])
    result, _ = here.ask([Receive(6, 1, "there")], fetch=(6,))
    [failure] = result.failures
    assert (failure.source, failure.source_identity) == ("here", 1)
    assert result.items == (Poisoned(failure.identity),)


def test_a_failure_that_is_forgotten_still_poisons(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_FAILURES", 2)
    here, there = sides
    here.ask([Run(99, (), [], (3,))])
    for _ in range(3):
        here.ask([Run(98, (), [], (4,))])
    here.ask([Send(3, 1, 1)])
    result, _ = there.ask([Receive(5, 1, "here")], fetch=(5,))
    assert kinds(result) == ["RuntimeError"]
    assert isinstance(result.items[0], Poisoned)


def test_what_does_not_travel_poisons_the_receiver(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.ones(2, 2))
    here.ask([Define(9, one_step(aten.to_mkldnn.default, TENSOR)), Run(9, (1,), [], (2,))])
    here.ask([Send(2, 1, 1)])
    result, _ = there.ask([Receive(5, 1, "here")], fetch=(5,))
    assert kinds(result) == ["RuntimeError"]
    assert "only strided ones become values" in result.failures[0].message


def test_a_session_without_post_says_so() -> None:
    service = SessionService(CpuExecutor())
    result, _ = service.handle(Batch([Peer(1, "x", bytes(16)), Send(1, 1, 1), Receive(2, 1, "x")], fetch=(2,)), [])
    assert kinds(result) == ["PeerError"] * 3
    assert isinstance(result.items[0], Poisoned)


def test_a_peer_that_ends(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.post.close()
    result, _ = there.ask([Receive(5, 1, "here")], fetch=(5,))
    assert kinds(result) == ["PeerError"]
    here.upload(1, torch.ones(1))
    assert kinds(here.ask([Send(1, 1, 2)])[0]) == ["PeerError"]
    assert kinds(there.ask([Send(5, 1, 1)])[0]) == []
    here.room.close()
    assert kinds(there.ask([Send(5, 1, 2)])[0]) == ["PeerError"]


def test_receiving_drops_what_was_run_ahead(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.full((2,), 5.0))
    here.ask([Send(1, 1, 1), Send(1, 1, 2)])
    there.upload(5, torch.ones(2))
    there.upload(6, torch.ones(2))
    there.ask([Run(ADD, (5, 6), [], (7,))])
    for _ in range(8):
        there.ask([RunDelta(ADD)])
        there.service.look_ahead()
    hits, misses = there.service.runs_ahead
    assert hits
    assert not misses
    # What is sent has changed nothing.
    there.ask([Send(7, 1, 1)])
    there.ask([RunDelta(ADD)])
    assert there.service.runs_ahead == (hits + 1, 0)
    there.service.look_ahead()
    there.ask([Receive(5, 1, "here")])
    _, [got] = there.ask([RunDelta(ADD)], fetch=(7,))
    assert got.tolist() == [6.0, 6.0]
    assert there.service.runs_ahead == (hits + 1, 1)


def test_timings_come_once_asked_for_and_cost_nothing_before(sides: tuple[Side, Side]) -> None:
    here, there = sides
    before = time.monotonic_ns()
    result, _ = here.ask([Run(99, (), [], (3,))])
    assert (result.timings, result.now_ns) == ((), 0)
    result, _ = here.ask([], timed=True)
    assert result.timings == ()
    tensor = torch.ones(2)
    here.service.handle(Batch([Upload(8, header_of(tensor)), Run(ADD, (8, 8), [], (9,))]), [tensor])
    result, _ = here.ask([Send(9, 1, 6), Free((9,)), Forget((99,))])
    assert [(timing.kind, timing.number) for timing in result.timings] == [("upload", 8), ("run", ADD), ("send", 6)]
    moments = [moment for timing in result.timings for moment in (timing.begin_ns, timing.end_ns)]
    assert before < moments[0]
    assert moments == sorted(moments)
    assert moments[-1] <= result.now_ns <= time.monotonic_ns()
    result, _ = there.ask([Receive(5, 6, "here")], timed=True)
    assert [(timing.kind, timing.number) for timing in result.timings] == [("receive", 6)]


def test_timings_that_nobody_fetches_are_bounded(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "MAX_TIMINGS", 5)
    here, _ = sides
    here.service.handle(Batch([Run(number, (), [], ()) for number in range(10, 30)], timed=True), [])
    result, _ = here.ask([])
    assert [timing.number for timing in result.timings] == [25, 26, 27, 28, 29]


def test_held_bytes_counts_each_storage_once_as_long_as_something_lies_in_it(sides: tuple[Side, Side]) -> None:
    here, there = sides
    here.upload(1, torch.zeros(256))
    assert here.service.held_bytes == 1024
    here.ask([Run(TRANSPOSE, (1,), [], (2,))])
    assert here.service.held_bytes == 1024
    here.ask([Run(ADD, (1, 2), [], (3,)), Send(1, 1, 1)])
    assert here.service.held_bytes == 2048
    here.ask([Free((1,))])
    assert here.service.held_bytes == 2048
    here.ask([Free((2, 17))])
    assert here.service.held_bytes == 1024
    here.upload(3, torch.zeros(2))
    assert here.service.held_bytes == 8
    here.ask([Run(99, (), [], (3,))])
    assert here.service.held_bytes == 0
    there.ask([Receive(5, 1, "here")])
    assert there.service.held_bytes == 1024
    there.service.close()
    assert there.service.held_bytes == 0
