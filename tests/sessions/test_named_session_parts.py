"""Named sessions of a worker, in this process: what the next client finds, when it ends, and what counts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest
import torch
from support.memory.room import Clock, open_executor

from djinn.errors import LimitError, RefusedError
from djinn_plugins.common.operators.named_values import NamedReply, NamedRequest, NamedSession
from djinn_plugins.executor.service import SessionService
from djinn_plugins.server.control import Seen
from djinn_plugins.server.control_channel import FROM_WORKER
from djinn_plugins.server.counters import MAX_NAMED
from djinn_plugins.server.limits import Allowances, SessionAllowance
from djinn_plugins.server.named_sessions import NamedSessions, SessionNames
from djinn_plugins.server.sessions import Sessions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenants import written


@attrs.define(eq=False)
class Channel:
    """A client's connection."""

    peer: str
    is_connected: bool = True

    def finish(self) -> None:
        self.is_connected = False


@attrs.define(eq=False)
class Client:
    """A session of a worker."""

    service: SessionService
    names: SessionNames
    allowance: SessionAllowance

    def leave(self) -> None:
        """End the session, as the server does."""
        self.service.close(self.names.kept())
        self.names.left()
        self.allowance.close()


class Worker:
    """The sessions of one tenant."""

    def __init__(self, handles: int = 0) -> None:
        self.clock = Clock()
        self.allowances = Allowances(Limits(handles=handles))
        self.named = NamedSessions(10.0, 2, self.allowances, self.clock)
        self._executor = open_executor()
        self._count = itertools.count()

    def begin(self) -> Client:
        allowance = self.allowances.open()
        service = SessionService(self._executor, allowance=allowance)
        number = next(self._count)
        channel: Any = Channel(f"tcp://host:{number}")
        return Client(service, SessionNames(self.named, f"session {number}", channel, service, allowance), allowance)

    def open(self, name: str, **asked: Any) -> tuple[Client, NamedReply]:
        """Begin a session, and let it open a name; values of an earlier one come between two messages."""
        client = self.begin()
        reply = client.names.answer(NamedRequest(name, **asked))
        if reply.wait_s:
            client.names.settle()
            reply = client.names.answer(NamedRequest(name, **asked))
        return client, reply


def test_the_next_client_finds_the_same_memory_and_no_other_has_it_open_meanwhile() -> None:
    worker = Worker()
    first, _ = worker.open("lab")
    whole = torch.arange(6.0)
    assert not first.names.keep("pair", b"structure", [whole, whole[2:]]).problem
    refused = worker.open("lab")[1]
    assert (refused.code, "open in another process, at tcp://host:0" in refused.problem) == (RefusedError.code, True)
    whole.mul_(2)
    first.leave()
    second, reply = worker.open("lab")
    (kept,) = reply.values
    assert (kept.name, kept.structure) == ("pair", b"structure")
    assert [(tensor.storage, tensor.size, tensor.storage_offset) for tensor in kept.tensors] == [
        (0, (6,), 0), (0, (4,), 2)]
    assert not second.names.take("pair", [1, 2]).problem
    values = second.service.memory.values
    values[2].zero_()
    assert values[1].tolist() == [0, 2, 0, 0, 0, 0]


def test_a_session_ends_with_its_lease_which_the_server_bounds() -> None:
    worker = Worker()
    client, reply = worker.open("lab", lease_s=3600.0)
    assert reply.lease_s == 10
    client.names.keep("x", b"", [torch.ones(2)])
    worker.clock.now_s += 60
    worker.named.expire()
    client.leave()
    worker.clock.now_s += 9
    worker.named.expire()
    (listed,) = worker.named.listed()
    assert (listed.name, listed.values, listed.left_s) == ("lab", 1, pytest.approx(1, abs=0.1))
    worker.clock.now_s += 1
    worker.named.expire()
    assert worker.named.listed() == ()
    reply = worker.open("lab")[1]
    assert (reply.values, reply.note) == ((), "its lease was over, 10 s after its client had left")


def test_a_session_that_gives_its_name_up_keeps_its_values_and_its_client() -> None:
    worker = Worker()
    client, _ = worker.open("lab")
    client.names.keep("x", b"", [torch.ones(2)])
    worker.named.rename("lab", "tcp://other:1")
    worker.named.rename("lab", "tcp://other:1")
    ((name, began_s),) = worker.named.began()
    assert name == f"lab~{written(began_s)}"
    assert not client.names.keep("y", b"", [torch.ones(2)]).problem
    client.leave()
    refused = worker.open("lab", is_known=True)[1]
    assert f"it is {name!r} now, because tcp://other:1 has a later one" in refused.problem
    assert [kept.name for kept in worker.open(name)[1].values] == ["x", "y"]
    assert worker.open("lab")[1].values == ()


def test_values_count_while_no_client_has_them_and_so_do_names() -> None:
    worker = Worker(handles=5)
    client, _ = worker.open("lab")
    client.names.keep("x", b"", [torch.ones(2) for _ in range(3)])
    client.allowance.settle(client.service.live_handles)
    client.leave()
    other = worker.begin()
    with pytest.raises(LimitError, match="6 values; the limit for all sessions is 5"):
        other.allowance.admit_values(0, 3)
    other.allowance.admit_values(0, 2)
    other.leave()
    assert not worker.open("second")[1].problem
    refused = worker.open("third")[1]
    assert (refused.code, "2 named sessions already" in refused.problem) == (LimitError.code, True)


def test_a_worker_lists_no_more_names_than_the_gateway_takes() -> None:
    listed = tuple(NamedSession(f"name-{number}") for number in range(MAX_NAMED + 1))
    many: Any = SimpleNamespace(closed=tuple, listed=lambda: listed)
    seen = FROM_WORKER.decode(msgspec.msgpack.encode(Seen(1, *Sessions(named=many).states_and_names())))
    assert seen.named == listed[:MAX_NAMED]
