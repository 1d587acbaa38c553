"""What a server has already is not sent again: to its owner, exactly, and to nobody else."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.processes.warm import run_python
from support.servers.connection_options import connect_options
from torch import nn

import djinn
from djinn.errors import TransportError
from djinn.session import runtime
from djinn.wire.messages import (
    DIGESTS_HANDLE,
    GENERATOR_HANDLE,
    MARKS_HANDLE,
    PROTOCOL_VERSION,
    Batch,
    Description,
    Free,
    Plain,
    Poisoned,
    Result,
    Upload,
    UploadByDigest,
    Welcome,
)
from djinn.wire.tensors import header_of
from djinn_plugins.client.upload_dedup import ASK_AGAIN_BYTES, DedupConnection, introduce, reusing, this_machine
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.memory.upload_digests import digest_of
from djinn_plugins.common.settings.connection import UploadSettings
from djinn_plugins.transport.tcp.client import connect

DEVICE = torch.device("remote_accelerator:0")
OWNER = "a secret of these tests"


def build(seed: int = 0, layers: int = 6) -> nn.Module:
    """Make 6 MB of weights."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))


def size_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def moved(model: nn.Module) -> tuple[nn.Module, int, int]:
    """Move a copy; say how much was sent and how much was not."""
    remote = copy.deepcopy(model)
    djinn.synchronize()
    djinn.reset_stats()
    remote.to(DEVICE)
    djinn.synchronize()
    stats = djinn.stats()
    return remote, stats["bytes_sent"], stats["bytes_not_sent"]


def assert_same(remote: nn.Module, local: nn.Module) -> None:
    for name, tensor in local.state_dict().items():
        assert torch.equal(remote.state_dict()[name].cpu(), tensor), name


@pytest.fixture
def keeper(start_server: Any) -> Iterator[Any]:
    """A server that keeps 64 MiB."""
    yield start_server("--keep-mib", "64")
    djinn.init()


def test_a_second_session_of_the_owner_sends_digests(keeper: Any) -> None:
    model = build()
    djinn.init(server=keeper.address, owner=OWNER)
    _, sent, spared = moved(model)
    assert sent > size_of(model)
    assert spared == 0
    for _ in range(2):
        djinn.init(server=keeper.address, owner=OWNER)
        remote, again, spared = moved(model)
        assert again < 0.01 * sent
        assert spared > 0.99 * size_of(model)
        assert_same(remote, model)


def test_another_process_of_the_owner_sends_digests(keeper: Any) -> None:
    program = """
import sys, torch, djinn
torch.manual_seed(5)
model = torch.nn.Linear(512, 512).to("remote_accelerator:0")
djinn.synchronize()
print(djinn.stats()["bytes_sent"], djinn.stats()["bytes_not_sent"], model.weight.sum().item())
"""
    outputs = []
    for _ in range(2):
        done = run_python(program, has_djinn=True, DJINN_SERVER=keeper.address, DJINN_OWNER="of both")
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert int(outputs[0][0]) > 2**20 > 50 * int(outputs[1][0])
    assert [outputs[0][1], outputs[1][1]] == ["0", str(2**20)]
    assert outputs[0][2] == outputs[1][2]


def test_within_a_session_a_second_copy_is_not_sent(keeper: Any) -> None:
    model = build(layers=12)
    djinn.init(server=keeper.address, owner=OWNER)
    _, sent, spared = moved(model)
    assert sent > size_of(model) > ASK_AGAIN_BYTES
    assert spared == 0
    remote, again, spared = moved(model)
    assert again < 0.01 * sent
    assert spared > 0.99 * size_of(model)
    assert_same(remote, model)


def test_state_dicts_are_reused_too(keeper: Any) -> None:
    model = build()
    for expected in (0, 0.99 * size_of(model)):
        djinn.init(server=keeper.address, owner=OWNER)
        with DEVICE:
            remote = build(1)
        remote.load_state_dict(model.state_dict())
        djinn.synchronize()
        assert djinn.stats()["bytes_not_sent"] >= expected
        assert_same(remote, model)


@pytest.mark.parametrize("writes", ["after the upload", "after the recall"])
def test_writes_in_place_reach_no_other_value(keeper: Any, writes: str) -> None:
    model = build()
    if writes == "after the recall":
        djinn.init(server=keeper.address, owner=OWNER)
        moved(model)
    djinn.init(server=keeper.address, owner=OWNER)
    trained, _, _ = moved(model)
    optimizer = torch.optim.SGD(trained.parameters(), 0.5)
    for _ in range(2):
        trained(torch.ones(4, 512, device=DEVICE)).sum().backward()
        optimizer.step()
    with torch.inference_mode():
        trained[0].weight.zero_()
    djinn.synchronize()
    other = DedupConnection(connect(keeper.address, connect_options(owner=OWNER)))
    for number, tensor in enumerate((model[0].weight.data, model[1].weight.data), 1):
        other.submit(Batch([Upload(number, header_of(tensor))]), [tensor])
    _, data = other.request(Batch(fetch=(1, 2)), ())
    assert other.bytes_not_sent == 2 * 2**20
    assert torch.equal(data[0], model[0].weight)
    assert torch.equal(data[1], model[1].weight)
    other.close()
    assert torch.count_nonzero(trained[0].weight).item() == 0


def test_another_owner_gains_nothing(keeper: Any) -> None:
    model = build()
    djinn.init(server=keeper.address, owner=OWNER)
    moved(model)
    for owner in ("somebody else", ""):
        djinn.init(server=keeper.address, owner=owner)
        _, sent, spared = moved(model)
        assert sent > size_of(model)
        assert spared == 0


def test_on_the_same_machine_nothing_is_kept_unless_asked_for(keeper: Any) -> None:
    model = build()
    for _ in range(2):
        session = djinn.init(server=keeper.address)
        _, sent, spared = moved(model)
        assert sent > size_of(model)
        assert spared == 0
        assert session.backend.welcome.kept == -1


def test_a_server_may_refuse_to_keep_anything(start_server: Any) -> None:
    running = start_server("--keep-mib", "0")
    for _ in range(2):
        djinn.init(server=running.address, owner=OWNER)
        _, sent, spared = moved(build())
        assert sent > size_of(build())
        assert spared == 0
    djinn.init()


def test_what_there_is_no_room_for_is_sent_again(start_server: Any) -> None:
    running = start_server("--keep-mib", "3")
    model = build()
    for expected in (0, 3 * 2**20):
        # Values that are let go of while others are uploaded would make room for those.
        djinn.init(server=running.address, owner=OWNER, flush_every=None)
        remote, _, spared = moved(model)
        assert spared == expected
        assert_same(remote, model)
    djinn.init()


def test_what_merely_looks_the_same_is_sent(keeper: Any) -> None:
    first = torch.zeros(2**19)
    second, third = first.clone(), first.clone()
    second[12_345] = third[54_321] = 1.0
    assert len({mark_of(header_of(tensor), tensor) for tensor in (first, second, third)}) == 1
    for values, expected in (([first, second], 0), ([first, third, second], first.nbytes)):
        djinn.init(server=keeper.address, owner=OWNER)
        lazy = [value.to(DEVICE) for value in values]
        for remote, value in zip(lazy, values, strict=True):
            assert torch.equal(remote.cpu(), value)
        assert djinn.stats()["bytes_not_sent"] == expected


def test_bits_are_kept_whatever_they_mean(keeper: Any) -> None:
    values = [
        torch.tensor([0.0, -0.0, float("nan"), float("inf")]).repeat(2**15),
        torch.randn(300, 200).t(),
        torch.randn(200, 200, dtype=torch.complex64).conj(),
        torch.randint(0, 2, (300, 300)).bool(),
        torch.randn(200, 200).to(torch.float8_e5m2),
        torch.randn(400, 400, dtype=torch.bfloat16)[:, 10:300],
    ]
    for turn in range(2):
        djinn.init(server=keeper.address, owner=OWNER)
        lazy = [value.to(DEVICE) for value in values]
        for value, remote in zip(values, lazy, strict=True):
            local = remote.cpu()
            assert (local.dtype, local.stride()) == (value.dtype, value.clone().stride())
            plain = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (local, value)]
            assert torch.equal(*(t.contiguous().view(torch.uint8) for t in plain))
        # The smallest ones are not looked at.
        assert (djinn.stats()["bytes_not_sent"] > 0.7 * sum(value.nbytes for value in values)) is bool(turn)


class Counting:
    """A connection that counts who waits."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.requests: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> Any:
        self.requests.append(batch)
        return self._connection.request(batch, tensors)


def uploading(connection: Any, tensors: Sequence[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors, 1):
        connection.submit(Batch([Upload(number, header_of(tensor))]), [tensor])


def opened(keeper: Any, owner: str = OWNER) -> tuple[DedupConnection, Counting]:
    counting = Counting(connect(keeper.address, connect_options(owner=owner)))
    return DedupConnection(counting), counting


def test_nobody_waits_where_nothing_is_kept_and_twice_at_most_where_something_is(keeper: Any) -> None:
    tensors = [torch.randn(256, 256) for _ in range(100)]
    other = [torch.randn(256, 256) for _ in range(100)]
    for sent, waits, spared in ((tensors, 0, 0), (tensors, 2, 100), (other, 1, 0), (tensors, 2, 100)):
        connection, counting = opened(keeper)
        uploading(connection, sent)
        assert len(counting.requests) == waits
        assert connection.bytes_not_sent == spared * tensors[0].nbytes
        _, data = connection.request(Batch(fetch=(1, 100)), ())
        assert torch.equal(data[0], sent[0])
        assert torch.equal(data[1], sent[99])
        connection.close()


def test_what_looks_the_same_each_time_is_asked_for_less_and_less(keeper: Any) -> None:
    connection, counting = opened(keeper, "of many")
    tensor = torch.zeros(2**18)
    for step in range(1, 101):
        tensor[100] = step
        connection.submit(Batch([Free((1,)), Upload(1, header_of(tensor))]), [tensor])
    # 100 MB: after 8, then 16, then 32 of them; each time marks and digests.
    assert 1 <= len(counting.requests) <= 8
    assert torch.equal(connection.request(Batch(fetch=(1,)), ())[1][0], tensor)
    connection.close()


def test_a_failure_that_comes_with_the_answer_is_not_lost(keeper: Any) -> None:
    model = build()
    djinn.init(server=keeper.address, owner=OWNER)
    moved(model)
    djinn.init(server=keeper.address, owner=OWNER)
    failed = nn.functional.embedding(torch.tensor([9], device=DEVICE), torch.ones(2, 2, device=DEVICE))
    runtime.current().flush()
    remote = copy.deepcopy(model).to(DEVICE)
    with pytest.raises(IndexError):
        djinn.synchronize()
    del failed
    assert djinn.stats()["bytes_not_sent"] > 0
    assert_same(remote, model)


def test_a_digest_opens_nothing_of_others(keeper: Any) -> None:
    tensor = torch.randn(256, 256)
    digest = digest_of(header_of(tensor), tensor)
    owner, stranger = (connect(keeper.address, connect_options(owner=name)) for name in ("a", "b"))
    owner.request(Batch([Upload(1, header_of(tensor))], fetch=(DIGESTS_HANDLE,)), [tensor])
    result, _ = stranger.request(Batch([UploadByDigest(1, digest)], fetch=(1, MARKS_HANDLE, DIGESTS_HANDLE)), ())
    assert [failure.kind for failure in result.failures] == ["ProtocolError"]
    assert isinstance(result.items[0], Poisoned)
    assert result.items[1:] == (Plain([]), Plain([]))
    result, data = owner.request(Batch([UploadByDigest(2, digest)], fetch=(2,)), ())
    assert not result.failures
    assert torch.equal(data[0], tensor)
    for connection in (owner, stranger):
        connection.close()


def test_what_was_not_told_is_not_recalled_and_the_session_lives(keeper: Any) -> None:
    tensor = torch.randn(256, 256)
    connection = connect(keeper.address, connect_options(owner=OWNER))
    connection.submit(Batch([Upload(1, header_of(tensor))]), [tensor])
    guess = random.Random(0)
    for _ in range(50):
        digest = guess.choice([guess.randbytes(32), digest_of(header_of(tensor), tensor), bytes(32)])
        handle = guess.choice([GENERATOR_HANDLE, 2, MARKS_HANDLE, DIGESTS_HANDLE, 2**63])
        result, _ = connection.request(Batch([UploadByDigest(handle, digest)], describe=(handle,)), ())
        assert {failure.kind for failure in result.failures} <= {"ProtocolError", "UnknownHandleError"}
        assert result.failures
        assert isinstance(result.items[0], Poisoned)
    result, data = connection.request(Batch(fetch=(1,)), ())
    assert not result.failures
    assert torch.equal(data[0], tensor)
    result, _ = connection.request(Batch(fetch=(DIGESTS_HANDLE,)), ())
    digest = result.items[0].value[0]  # type: ignore[union-attr]  # it is plain
    result, _ = connection.request(Batch([UploadByDigest(0, digest), UploadByDigest(9, digest)], describe=(0, 9)), ())
    assert len(result.failures) == 2, "one for writing to the reserved handle, one for reading it"
    assert isinstance(result.items[1], Description)
    connection.close()


@pytest.mark.parametrize("answer", [
    Result((Plain([b"short"]),)), Result((Plain("text"),)), Result((Plain(None),)), Result((Poisoned(1),)), Result(),
    Result((Plain([["nested"]]),)),
])
def test_a_server_that_answers_nonsense_is_not_believed(serve: Any, open_connection: Any, answer: Result) -> None:
    def script(channel: Any) -> None:
        sequence, _, _ = channel.receive()
        channel.send(sequence, Welcome(PROTOCOL_VERSION, "", "", sys.byteorder, "cpu", "0", 5))
        channel.greeted()
        sequence, batch, _ = channel.receive()
        assert batch == Batch(fetch=(MARKS_HANDLE,))
        channel.send(sequence, answer)
        channel.receive()

    address = serve(script, greets=False)
    connection = reusing(open_connection(address, owner=OWNER))
    tensor = torch.zeros(2**16)
    with pytest.raises(TransportError, match=address):
        connection.submit(Batch([Upload(1, header_of(tensor))]), [tensor])
    connection.close()


def test_who_the_owner_is() -> None:
    assert introduce("", "token") == ("", "")
    secret, machine = introduce("mine", "token")
    assert machine == ""
    assert secret == hashlib.sha256(b"token\0mine").hexdigest()
    assert "mine" not in secret
    assert len({introduce(owner, token)[0] for owner in ("mine", "yours", "auto") for token in ("", "a")}) == 6
    assert introduce("auto", "") == introduce("auto", "")
    assert introduce("auto", "")[1] == this_machine() != ""


def test_secrets_are_not_logged(start_server: Any) -> None:
    running = start_server("--keep-mib", "8", DJINN_LOG_LEVEL="DEBUG")
    djinn.init(server=running.address, owner=OWNER)
    moved(build())
    djinn.init()
    assert running.stop() == 0
    text = running.log.read_text()
    assert OWNER not in text
    assert introduce(OWNER, "")[0] not in text
    assert OWNER not in repr(UploadSettings(owner=OWNER))
