"""Bad input to a real server: a typed error or a closed connection, and nothing happens to anybody else."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch

from djinn.errors import RefusedError
from djinn.ir.program import (
    ConstantArgument,
    ListArgument,
    NumberArgument,
    Program,
    Step,
    Template,
    TensorArgument,
    TorchArgument,
)
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire import messages
from djinn.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Define,
    Failure,
    Forget,
    Free,
    Hello,
    Peer,
    PeerHello,
    Plain,
    Poisoned,
    Refusal,
    Result,
    Run,
    RunDelta,
    Seed,
    Send,
    TensorHeader,
    Upload,
    UploadByDigest,
    ValueTransfer,
    Welcome,
)
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.frames import HEAD, MAGIC, encode_head
from djinn_plugins.transport.tcp.client import SocketConnection, connect

CORPUS = Path(__file__).parents[2] / "specs" / "wire" / "malformed.json"
HELLO = Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder)
KEPT = torch.arange(1000.0)


def frame(message: Any, body: bytes = b"", *, sequence: int = 1) -> bytes:
    header = messages.encode(message)
    return encode_head(sequence, len(header), len(body)) + header + body


def raw(header: bytes, body_bytes: int = 0) -> bytes:
    return encode_head(1, len(header), body_bytes) + header


@pytest.fixture(scope="module")
def bystander(server: Any) -> Iterator[SocketConnection]:
    """Somebody with a value, who was there before."""
    connection = connect(server.address, ConnectOptions())
    connection.request(Batch([Upload(1, header_of(KEPT))], synchronize=True), [KEPT])
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def nobody_else_is_harmed(bystander: SocketConnection, server: Any) -> Iterator[None]:
    yield
    assert server.process.poll() is None
    result, data = bystander.request(Batch(fetch=(1,)), ())
    assert not result.failures
    assert torch.equal(data[0], KEPT)


def malformed() -> list[Any]:
    return [pytest.param(bytes.fromhex(case["frame"]), case["error"], id=case["id"])
            for case in json.loads(CORPUS.read_text())["cases"]]


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize(("data", "code"), malformed())
def test_malformed_frames_are_refused_by_code(
    server: Any, raw_client: Any, data: bytes, code: str, greets: bool,
) -> None:
    with raw_client(server.port, greets=greets) as client:
        client.send(data)
        client.end()
        if len(data) < HEAD.size:
            assert client.outcome() == "closed"
        else:
            assert client.outcome() == code
            assert client.outcome() == "closed"


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_random_bytes(server: Any, raw_client: Any, seed: int, greets: bool) -> None:
    data = random.Random(seed).randbytes(random.Random(seed).choice([1, 31, 32, 33, 1000, 200_000]))
    with raw_client(server.port, greets=greets) as client:
        client.send(data)
        client.end()
        assert client.outcome() == ("closed" if len(data) < HEAD.size else "DJ303")


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("cut", [1, 31, 32, 40, 100])
def test_truncated_frames(server: Any, raw_client: Any, cut: int, greets: bool) -> None:
    data = frame(Batch([Upload(1, header_of(KEPT))]), bytes(4032)) if greets else frame(HELLO)
    with raw_client(server.port, greets=greets) as client:
        client.send(data[:min(cut, len(data) - 1)])
        client.end()
        assert client.outcome() == "closed"


OTHER_ORDER = "big" if sys.byteorder == "little" else "little"
GREETINGS = {
    "batch": (frame(Batch()), "DJ303"),
    "result": (frame(Result()), "DJ303"),
    "later-protocol": (frame(Hello(PROTOCOL_VERSION + 1, "", "", sys.byteorder)), "DJ304"),
    "later-frames": (HEAD.pack(MAGIC, 7, 0, 1, 10, 0, 0), "DJ304"),
    "other-byte-order": (frame(Hello(PROTOCOL_VERSION, "", "", OTHER_ORDER)), "DJ305"),
    "odd-byte-order": (frame(Hello(PROTOCOL_VERSION, "", "", "\x1b[31m\n")), "DJ305"),
    "transfer": (frame(ValueTransfer(1, Plain(1))), "DJ303"),
    "peer-to-nobody": (frame(PeerHello(PROTOCOL_VERSION, sys.byteorder, bytes(16), "")), "DJ305"),
    "peer-of-a-later-protocol": (frame(PeerHello(PROTOCOL_VERSION + 1, sys.byteorder, bytes(16), "")), "DJ304"),
    "peer-of-another-byte-order": (frame(PeerHello(PROTOCOL_VERSION, OTHER_ORDER, bytes(16), "\x1b[31m")), "DJ305"),
    "peer-too-long": (frame(PeerHello(PROTOCOL_VERSION, sys.byteorder, bytes(16), "x" * 4096)), "DJ303"),
    "too-long": (frame(Hello(PROTOCOL_VERSION, "x" * 4096, "", sys.byteorder)), "DJ303"),
    "too-long-nonsense": (raw(b"\x00" * 4097), "DJ303"),
}


@pytest.mark.parametrize(("data", "code"), list(GREETINGS.values()), ids=list(GREETINGS))
def test_greetings_that_are_refused(server: Any, raw_client: Any, data: bytes, code: str) -> None:
    with raw_client(server.port, greets=False) as client:
        client.send(data)
        assert client.outcome() == code
        assert client.outcome() == "closed"
    assert "\x1b" not in server.log.read_text()


def test_messages_that_are_not_the_clients_to_send(server: Any, raw_client: Any) -> None:
    for message in (HELLO, Result(), Refusal("", ""), Welcome(1, "", "", "", "", ""),
                    PeerHello(PROTOCOL_VERSION, sys.byteorder, bytes(16), ""), ValueTransfer(1, Plain(1))):
        with raw_client(server.port) as client:
            client.send(frame(message))
            assert client.outcome() == "DJ303"


def test_a_body_that_is_announced_and_does_not_come(server: Any, raw_client: Any) -> None:
    header = messages.encode(Batch([Upload(1, TensorHeader("uint8", (2**33,), (1,)))]))
    with raw_client(server.port) as client:
        client.send(encode_head(1, len(header), 2**33) + header + bytes(1000))
        client.end()
        assert client.outcome() == "closed"


DIGEST = facts_of(torch.ops.aten.add.Tensor).digest
ADD = (TensorArgument(), TensorArgument())
RUN = Run(1, (1, 1), [], (9,))
ONES = torch.ones(4)


def define(arguments: tuple[Any, ...] = ADD, *, name: str = "aten::add.Tensor", digest: str = DIGEST,
           operands: tuple[int, ...] = (-1, -2), keep: tuple[int, ...] = (0,), template: int = 0,
           switches: tuple[tuple[str, str], ...] = ()) -> Define:
    """Program 1: one call with two inputs."""
    templates = (Template(name, digest, arguments, switches=switches),)
    return Define(1, Program(templates, (Step(template, operands, 1),), 2, keep))


def nested(argument: Any, depth: int) -> Any:
    for _ in range(depth):
        argument = ListArgument((argument,))
    return argument


def deep_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@attrs.frozen
class BadBatch:
    """Commands that are well formed and cannot be carried out."""

    id: str
    kind: str
    commands: list[Any]
    fetch: tuple[int, ...] = (9,)


BYSTANDER = 77
READ_FILE = facts_of(torch.ops.aten.from_file.default).digest
BAD_BATCHES = [
    BadBatch("unknown-handle", "UnknownHandleError", [], fetch=(2**63,)),
    BadBatch("unknown-program", "ProtocolError", [Run(3, (), [], (9,))]),
    BadBatch("forgotten-program", "ProtocolError", [define(), Forget((1,)), RUN]),
    BadBatch("unknown-operator", "UnknownOperatorError", [define(name="aten::nothing.here"), RUN]),
    BadBatch("operator-path", "UnknownOperatorError", [define(name="os::system.__call__"), RUN]),
    BadBatch("operator-injection", "UnknownOperatorError", [define(name="aten::add.Tensor)(\nimport os"), RUN]),
    BadBatch("operator-on-files", "UnknownOperatorError", [
        define((ConstantArgument("/etc/passwd"),), name="aten::from_file", digest=READ_FILE, operands=()), RUN]),
    BadBatch("other-schema", "SchemaMismatchError", [define(digest="0" * 16), RUN]),
    BadBatch("unknown-switch", "ProtocolError", [define(switches=(("warnAlways", "on"),)), RUN]),
    BadBatch("switch-with-another-value", "ProtocolError", [
        define(switches=(("float32_matmul_precision", "__import__('os')"),)), RUN]),
    BadBatch("switch-given-twice", "ProtocolError", [
        define(switches=(("mkldnn_enabled", "off"), ("mkldnn_enabled", "on"))), RUN]),
    BadBatch("template-out-of-range", "ProtocolError", [define(template=1), RUN]),
    BadBatch("template-negative", "ProtocolError", [define(template=-1), RUN]),
    BadBatch("operand-out-of-range", "ProtocolError", [define(operands=(-1, 5)), RUN]),
    BadBatch("input-out-of-range", "ProtocolError", [define(operands=(-1, -3)), RUN]),
    BadBatch("operand-of-itself", "ProtocolError", [define(operands=(-1, 0)), RUN]),
    BadBatch("operands-missing", "ProtocolError", [define(operands=(-1,)), RUN]),
    BadBatch("keeps-what-is-not", "ProtocolError", [define(keep=(3,)), RUN]),
    BadBatch("nested-arguments", "ProtocolError", [define((nested(TensorArgument(), 300),), operands=(-1,)), RUN]),
    BadBatch("inputs-missing", "ProtocolError", [define(), Run(1, (1,), [], (9,))]),
    BadBatch("outputs-too-many", "ProtocolError", [define(), Run(1, (1, 1), [], (9, 10))]),
    BadBatch("output-reserved", "ProtocolError", [define(), Run(1, (1, 1), [], (0,))], fetch=(1,)),
    BadBatch("nested-numbers", "ProtocolError", [define(), Run(1, (1, 1), deep_list(400), (9,))]),
    BadBatch("odd-numbers", "ValueError", [define(), Run(1, (1, 1), [{"real": "x"}, None, "text"], (9,))]),
    BadBatch("goes-on-from-nothing", "ProtocolError", [define(), RunDelta(1)], fetch=(1,)),
    BadBatch("goes-on-at-no-such-place", "ProtocolError", [define(), RUN, RunDelta(1, {2: 1})], fetch=(1,)),
    BadBatch("goes-on-below-nothing", "ProtocolError", [define(), Run(1, (1, 1), [], (9,)), Run(1, (1, 1), [], (2,)),
                                                        RunDelta(1)], fetch=(1,)),
    BadBatch("goes-on-beyond-all-handles", "ProtocolError", [
        define(), RUN, Run(1, (1, 1), [], (2**63,)), Run(1, (1, 1), [], (2**64 - 1,)), RunDelta(1)], fetch=(1,)),
    BadBatch("goes-on-to-the-reserved-output", "ProtocolError", [
        define(), RUN, RunDelta(1, outputs={0: 0})], fetch=(1,)),
    BadBatch("odd-constant", "ProtocolError", [
        define((TensorArgument(), TorchArgument("dtype", "__class__")), operands=(-1,)), RUN]),
    BadBatch("numbers-missing", "ProtocolError", [define((TensorArgument(), NumberArgument()), operands=(-1,)), RUN]),
    BadBatch("text-where-tensor", "ProtocolError", [
        define((ConstantArgument("a"), ConstantArgument(None)), operands=()), RUN]),
    BadBatch("recall-where-nothing-is-kept", "ProtocolError", [UploadByDigest(9, bytes(32))]),
    BadBatch("peer-that-is-no-address", "PeerError", [Peer(1, "somewhere", bytes(16))], fetch=(1,)),
    BadBatch("peer-that-may-not-be", "PeerError", [Peer(1, "tcp://192.0.2.1:80", bytes(16))], fetch=(1,)),
    BadBatch("peer-on-a-path", "PeerError", [Peer(1, "unix:///var/run/docker.sock", bytes(16))], fetch=(1,)),
    BadBatch("peer-that-is-not-there", "PeerError", [Peer(1, "tcp://127.0.0.1:1", bytes(16))], fetch=(1,)),
    BadBatch("send-to-nobody", "PeerError", [Send(1, 5, 1)], fetch=(1,)),
    BadBatch("generator-from-nonsense", "TypeError", [Upload(0, header_of(ONES))], fetch=(1,)),
]


@pytest.mark.parametrize("bad", BAD_BATCHES, ids=lambda bad: bad.id)
def test_what_cannot_be_carried_out_is_a_typed_failure_and_the_session_lives(server: Any, bad: BadBatch) -> None:
    connection = connect(server.address, ConnectOptions())
    commands = [Upload(1, header_of(ONES)), Upload(BYSTANDER, header_of(ONES)), *bad.commands]
    uploads = [ONES for command in commands if isinstance(command, Upload)]
    result, _ = connection.request(Batch(commands, fetch=bad.fetch, describe=bad.fetch), uploads)
    assert {failure.kind for failure in result.failures} == {bad.kind}, result.failures
    if bad.fetch != (1,):
        assert all(isinstance(item, Poisoned) for item in result.items)
        assert {item.failure for item in result.items} <= {failure.identity for failure in result.failures}
    again, data = connection.request(Batch([Free((9,))], fetch=(1, BYSTANDER)), ())
    assert again.failures == ()
    assert len(data) == 2
    assert all(torch.equal(tensor, ONES) for tensor in data)
    connection.close()


def test_every_number_that_msgpack_has_is_a_handle_or_seed_that_does_no_harm(server: Any) -> None:
    connection = connect(server.address, ConnectOptions())
    for seed in (0, -1, 2**63 - 1, -(2**63), 2**64 - 1):
        result, _ = connection.request(Batch([Seed(seed), Free((2**64 - 1, 0))], fetch=(0,)), ())
        assert all(isinstance(failure, Failure) for failure in result.failures)
    connection.close()


def test_a_token_is_asked_for(start_server: Any) -> None:
    guarded = start_server(DJINN_TOKEN="correct horse")
    for token in ("", "wrong", "correct hors", "correct horse "):
        with pytest.raises(RefusedError) as caught:
            connect(guarded.address, ConnectOptions(token=token))
        assert "DJINN_TOKEN" in caught.value.hint
        assert "correct" not in str(caught.value)
    connection = connect(guarded.address, ConnectOptions(token="correct horse"))
    connection.request(Batch(synchronize=True), ())
    connection.close()
    assert "correct horse" not in guarded.log.read_text()


def test_a_header_of_many_small_lies_is_read_only_as_far_as_it_comes(server: Any, raw_client: Any) -> None:
    """A map that claims four billion entries inside of an otherwise plausible batch."""
    header = msgspec.msgpack.encode({"type": "batch"})[:-1] + b"h\xa8commands\xdd\xff\xff\xff\xff"
    with raw_client(server.port) as client:
        client.send(raw(header))
        assert client.outcome() == "DJ303"
