"""The wire format, byte for byte: what specs/wire says a frame means is what it means.

After a change of the format that is meant, raise ``PROTOCOL_VERSION`` and run this file with ``DJINN_UPDATE_WIRE=1``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch

from djinn.errors import ProtocolError
from djinn.ir.phase import ExecutionPhase
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
from djinn.wire import messages
from djinn.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    Batch,
    Copy,
    Define,
    Description,
    Failure,
    Forget,
    Free,
    Goodbye,
    Hello,
    Layout,
    Message,
    Peer,
    PeerHello,
    Plain,
    Poisoned,
    Receive,
    Redirect,
    Refusal,
    Result,
    Run,
    RunDelta,
    Seed,
    Send,
    Starting,
    TensorHeader,
    Timing,
    Upload,
    UploadByDigest,
    ValueTransfer,
    Warned,
    Welcome,
    to_wire,
)
from djinn.wire.tensors import header_of
from djinn_plugins.common.memory.tensor_bytes import buffer_of
from djinn_plugins.common.wire import short_messages
from djinn_plugins.common.wire.assumptions import AheadNote, Assumed, encode_assumed, noted
from djinn_plugins.common.wire.frames import (
    HEAD,
    MAGIC,
    SHORT_HEAD,
    SHORT_MARK,
    body_length,
    decode_head,
    decode_header,
    encode_head,
    head_bytes,
    head_for,
    padding,
    tensor_headers,
)

CORPUS = Path(__file__).parents[2] / "specs" / "wire"
FILES = ("greeting", "batches", "results", "transfers", "malformed")
pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the corpus holds little-endian tensors")


@attrs.frozen
class Case:
    """One frame and what becomes of it."""

    id: str
    frame: bytes

    def outcome(self) -> dict[str, Any]:
        """Decode the frame as a transport does and describe the result as JSON."""
        try:
            size = head_bytes(self.frame[0])
            head = decode_head(self.frame[:size])
            header = self.frame[size:size + head.header_bytes]
            message = decode_header(header, head.body_bytes)
        except ProtocolError as error:
            return {"error": error.code}
        body = self.frame[size + head.header_bytes:]
        assert len(body) == head.body_bytes
        return {
            "message": type(message).__name__,
            "sequence": head.sequence,
            "content": json.loads(msgspec.json.encode(message)),
            "tensors": [data.hex() for data in bodies(message, body)],
        }

    def entry(self) -> dict[str, Any]:
        """What the corpus holds."""
        return {"id": self.id, "frame": self.frame.hex(), **self.outcome()}


def bodies(message: Message, body: bytes) -> list[bytes]:
    found = []
    for header in tensor_headers(message):
        length = body_length([header])
        found.append(body[:length])
        body = body[length:]
    return found


def frame(message: Message, tensors: Sequence[torch.Tensor] = (), sequence: int = 1) -> bytes:
    header = short_messages.encode(message)
    body = b"".join(bytes(buffer_of(tensor)) + bytes(padding(tensor.nbytes)) for tensor in tensors)
    return head_for(message, sequence, len(header), len(body)) + header + body


def uploads(*tensors: torch.Tensor) -> bytes:
    return frame(Batch([Upload(number, header_of(tensor)) for number, tensor in enumerate(tensors, 1)]), tensors)


def raw(header: bytes, body_bytes: int = 0, body: bytes = b"") -> bytes:
    return encode_head(1, len(header), body_bytes) + header + body


PROGRAM = Program(
    (Template("aten::add.Tensor", "0123456789abcdef", (TensorArgument(), TensorArgument()),
              (("alpha", NumberArgument()),)),
     Template("aten::to.dtype", "fedcba9876543210", (
         TensorArgument(), TorchArgument("dtype", "float16"), ConstantArgument(value=False), ConstantArgument(None),
         ListArgument((ConstantArgument("text"), NumberArgument())))),
     ),
    (Step(0, (-1, -2), 1), Step(1, (0,), 1)), 2, (1,))


def greeting() -> list[Case]:
    return [
        Case("hello", frame(Hello(PROTOCOL_VERSION, "2.13.0+cpu", "3.11.7", "little"))),
        Case("hello-token", frame(Hello(PROTOCOL_VERSION, "2.13.0", "3.13.1", "little", "s\u00e9cret"),
                                  sequence=2**64 - 1)),
        Case("hello-owner", frame(Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", "", "ab" * 32, "cd" * 32))),
        Case("hello-ticket", frame(Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", ticket="0a" * 40))),
        Case("hello-resume", frame(Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", resumes=True,
                                         resume=bytes(range(16)), answered=2**40))),
        Case("redirect-port", frame(Redirect(":7778", "0a" * 40))),
        Case("redirect-elsewhere", frame(Redirect("tls://gpu-2.example.org:7778", "0a" * 40))),
        Case("welcome-kept", frame(Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", "cpu", "0f" * 16, 3))),
        Case("welcome", frame(Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", "cuda:0", "0f" * 16))),
        Case("welcome-mailbox", frame(Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", "cuda:0", "0f" * 16, -1,
                                              bytes(range(16)), 24 * 2**30, 2**20 + 1, 2))),
        Case("welcome-resume", frame(Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", "little", "cpu", "0f" * 16,
                                             resume=bytes(range(16)), lease_s=30.0, received=2**40 + 1))),
        Case("starting", frame(Starting(1.25))),
        Case("goodbye", frame(Goodbye(), sequence=0)),
        Case("peer-hello", frame(PeerHello(PROTOCOL_VERSION, "little", bytes(range(16)), "0f" * 16))),
        Case("refusal", frame(Refusal("DJ305", "The token is wrong.", "Set DJINN_TOKEN."), sequence=0)),
    ]


def batches() -> list[Case]:
    numbers = to_wire([1, -(2**63), 2**64 - 1, 0.5, complex(1, -2), [2, [3.25]]])
    return [
        Case("empty", frame(Batch())),
        Case("synchronize", frame(Batch(synchronize=True), sequence=7)),
        Case("fetch-and-describe", frame(Batch(fetch=(0, 2**40), describe=(1,)))),
        Case("free-forget-seed", frame(Batch([Free((1, 2)), Forget((3,)), Seed(-1)]))),
        Case("copy", frame(Batch([Copy(((1, 2, 0), (3, 2**64 - 1, 2)))]))),
        Case("upload-by-digest", frame(Batch([UploadByDigest(5, bytes(range(32)))], fetch=(2**64 - 1, 2**64 - 2)))),
        Case("peers", frame(Batch([Peer(1, "tcp://10.0.0.2:7777", bytes(range(16))), Send(5, 1, 2**64 - 1),
                                   Receive(6, 1, "0f" * 16), Receive(7, 2, "0f" * 16, (7, 8))], timed=True))),
        Case("later", frame(Batch([Run(1, (), [], (2, 3))], fetch=(2,), later=(3, 2**40)))),
        Case("metered", frame(Batch([Run(1, (), [], (2,))], metered=True))),
        Case("settled", frame(Batch([Run(1, (), [], (2,))], timed=True, settled=True))),
        Case("define", frame(Batch([Define(1, PROGRAM)]))),
        Case("run", frame(Batch([Run(1, (5, 6), numbers, (7,), (5,))], fetch=(7,)))),
        Case("run-delta", frame(Batch([RunDelta(1), RunDelta(2, {1: 2**63}, {0: [1, 2.5], 3: -1}, {0: 8}, {2: 4})]))),
        Case("predicted", frame(Batch([RunDelta(6)]), sequence=2**32 - 1)),
        Case("predicted-of-two", frame(Batch([RunDelta(7), RunDelta(2**40)], fetch=(2**40, 0)), sequence=2**32)),
        Case("predicted-in-another-phase", frame(Batch([RunDelta(6)], phase=ExecutionPhase.LLM_DECODE))),
        Case("upload-float32", uploads(torch.tensor([1.0, -0.5, 3.0]))),
        Case("upload-scalar-and-empty", uploads(torch.tensor(7, dtype=torch.int64), torch.empty(2, 0))),
        Case("upload-transposed", uploads(torch.arange(6, dtype=torch.int16).reshape(2, 3).t())),
        Case("upload-aligned", uploads(torch.arange(64, dtype=torch.uint8), torch.tensor([True, False]))),
    ]


def results() -> list[Case]:
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    return [
        Case("empty", frame(Result())),
        Case("ack", frame(Ack(), sequence=2**40)),
        Case("tensor", frame(Result((header_of(half),)), (half,))),
        Case("marks-and-digests", frame(Result((Plain([bytes(range(16))]), Plain([bytes(range(32))]))))),
        Case("everything", frame(Result(
            (Plain(None), header_of(half), Plain([1, 2.5, True]), Poisoned(3),
             Description("float32", (2, 3), (1, 2), 5)),
            (Failure(3, "IndexError", "out of range", "aten::index.Tensor", 4, 2),)), (half,))),
        Case("warnings", frame(Result((), warnings=(Warned("UserWarning", "degrees of freedom"), Warned("", ""))))),
        Case("run-time", frame(Result(run_ns=2**40))),
        Case("early", frame(Result((Plain(value=True),), assumes=bytes(range(16)), since=3))),
        Case("early-tensor", frame(Result((header_of(half), Plain(3)), assumes=bytes(range(16)), since=2**40,
                                          run_ns=7), (half,), sequence=9)),
        Case("early-of-others", frame(Result((Plain(3),), assumes=bytes(range(16)), since=2, others=encode_assumed(
            [Assumed("0f" * 16, 1, 2, 5, bytes(range(16)))])))),
        Case("later", frame(Result((header_of(half), Poisoned(3)), is_later=True), (half,), sequence=5)),
        Case("timings", frame(Result((), (Failure(2, "RuntimeError", "", source="0f" * 16, source_identity=7),),
                                     (Timing("run", 1, 2**62, 2**62 + 1), Timing("receive", 9, -1, 5)), 2**62 + 2))),
    ]


def transfers() -> list[Case]:
    flat = torch.arange(12, dtype=torch.int16)
    return [
        Case("tensor", frame(ValueTransfer(1, header_of(flat)), (flat,))),
        Case("memory", frame(ValueTransfer(2, header_of(flat), Layout((4, 7, 3), (3, 0, 1))), (flat,))),
        Case("packed", frame(ValueTransfer(3, header_of(flat), Layout((12,), (100,), is_packed=True)), (flat,))),
        Case("plain", frame(ValueTransfer(2**64 - 1, Plain([None, 1, 2.5, True])))),
        Case("ahead", frame(noted(ValueTransfer(5, header_of(flat)), AheadNote("value", (
            Assumed("0f" * 16, 1, 2, 5, bytes(range(16))),))), (flat,))),
        Case("requested", frame(noted(ValueTransfer(5), AheadNote("requested")))),
        Case("void", frame(noted(ValueTransfer(5), AheadNote("void")))),
        Case("failure", frame(ValueTransfer(4, failure=Failure(3, "IndexError", "out of range", "aten::index.Tensor", 4,
                                                        2,
                                                               "0f" * 16, 3)))),
    ]


def malformed() -> list[Case]:
    three = header_of(torch.ones(3))
    lying = messages.encode(Batch([Upload(1, three)]))
    return [
        Case("other-magic", HEAD.pack(b"GET ", PROTOCOL_VERSION, 0, 1, 0, 0, 0)),
        Case("other-version", HEAD.pack(MAGIC, 2**16 - 1, 0, 1, 0, 0, 0)),
        Case("flags", HEAD.pack(MAGIC, PROTOCOL_VERSION, 1, 1, 0, 0, 0)),
        Case("reserved", HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, 1, 0, 1, 0)),
        Case("header-too-long", HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, 1, 2**28, 0, 0)),
        Case("body-too-long", HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, 1, 0, 0, 2**63)),
        Case("short-head", encode_head(1, 0, 0)[:-1]),
        Case("short-head-cut-off", SHORT_HEAD.pack(SHORT_MARK, 0, 0, 1)[:-1]),
        Case("short-head-with-more-body", SHORT_HEAD.pack(SHORT_MARK, 1, 8, 1) + messages.encode(Batch()) + bytes(64)),
        Case("predicted-of-nothing-known", raw(msgspec.msgpack.encode(["b", [-1], []]))),
        Case("predicted-cut-off", raw(msgspec.msgpack.encode(["b", [1]]))),
        Case("early-without-digest", raw(msgspec.msgpack.encode(["r", [], b"", 1, 0]))),
        Case("short-of-another-kind", raw(msgspec.msgpack.encode(["x", [1], []]))),
        Case("no-header", raw(b"")),
        Case("no-msgpack", raw(b"\xc1")),
        Case("short-header", raw(messages.encode(Batch([Free((1,))]))[:-1])),
        Case("trailing-bytes", raw(messages.encode(Batch()) + b"\x00")),
        Case("other-type", raw(msgspec.msgpack.encode({"type": "pickle", "data": b"cos\nsystem\n."}))),
        Case("no-type", raw(msgspec.msgpack.encode({"commands": []}))),
        Case("array-of-4g", raw(b"\xdd\xff\xff\xff\xff")),
        Case("map-of-4g", raw(b"\xdf\xff\xff\xff\xff")),
        Case("string-of-4g", raw(b"\xdb\xff\xff\xff\xff")),
        Case("deeply-nested", raw(b"\x91" * 5000)),
        Case("nested-numbers", raw(b"\x82\xa4type\xa5batch\xa8commands\x91\x95\xa3run\x01\x90" + b"\x91" * 2000)),
        Case("negative-handle", raw(msgspec.msgpack.encode({"type": "batch", "fetch": [-1]}))),
        Case("copy-of-two-handles", raw(msgspec.msgpack.encode({"type": "batch", "commands": [["copy", [[1, 2]]]]}))),
        *(Case(name, raw(msgspec.msgpack.encode({"type": "batch", "commands": [["digest", 1, digest]]})))
          for name, digest in (("short-digest", bytes(31)), ("long-digest", bytes(33)), ("digest-as-text", "0" * 32))),
        Case("short-mailbox", raw(msgspec.msgpack.encode({"type": "batch", "commands": [["peer", 1, "", bytes(15)]]}))),
        Case("long-resume-key", raw(msgspec.msgpack.encode(
            {"type": "hello", "protocol": PROTOCOL_VERSION, "torch": "", "python": "", "byte_order": "little",
             "resume": bytes(17)}))),
        Case("long-mailbox", raw(msgspec.msgpack.encode(
            {"type": "peer_hello", "protocol": PROTOCOL_VERSION, "byte_order": "little", "mailbox": bytes(17),
             "session": ""}))),
        Case("transfer-of-a-description", raw(msgspec.msgpack.encode(
            {"type": "value_transfer", "transfer": 1, "item": ["spec", "int8", [1], [1], 0]}))),
        Case("transfer-without-body", raw(messages.encode(ValueTransfer(1, three)))),
        Case("transfer-with-more-body", raw(messages.encode(ValueTransfer(1, three)), 128, bytes(128))),
        Case("transfer-with-gaps",
             raw(messages.encode(ValueTransfer(1, TensorHeader("uint8", (9,), (2,)))), 64, bytes(64))),
        Case("transfer-of-many-dimensions",
             raw(messages.encode(ValueTransfer(1, three, Layout((1,) * 65, (1,) * 65))), 64,
                                                bytes(64))),
        Case("odd-timing", raw(msgspec.msgpack.encode({"type": "result", "timings": [["sleep", 1, 2, 3]]}))),
        Case("negative-run-time", raw(msgspec.msgpack.encode({"type": "result", "run_ns": -1}))),
        Case("text-too-long", raw(msgspec.msgpack.encode(
            {"type": "hello", "protocol": 1, "torch": "2" * 4097, "python": "", "byte_order": ""}))),
        Case("body-missing", raw(lying)),
        Case("body-too-short", raw(lying, 63, bytes(63))),
        Case("body-unannounced", raw(messages.encode(Batch()), 64, bytes(64))),
        Case("unknown-dtype", raw(announcing("object", (1,), (1,)), 64, bytes(64))),
        Case("overlapping", raw(announcing("uint8", (9,), (0,)), 64, bytes(64))),
        Case("with-gaps", raw(announcing("uint8", (9,), (2,)), 64, bytes(64))),
        Case("size-overflows", raw(announcing("uint8", (2**62, 4), (4, 1)))),
        Case("extent-overflows", raw(announcing("uint8", (2**63, 0), (1, 1)))),
    ]


def announcing(dtype: str, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """A header with one upload."""
    return messages.encode(Batch([Upload(1, TensorHeader(dtype, size, stride))]))


BUILDERS: dict[str, Callable[[], list[Case]]] = {
    "greeting": greeting, "batches": batches, "results": results, "transfers": transfers, "malformed": malformed,
}


def load(name: str) -> dict[str, Any]:
    return json.loads((CORPUS / f"{name}.json").read_text())


def test_the_corpus_is_complete() -> None:
    assert {path.stem for path in CORPUS.glob("*.json")} == set(FILES) == set(BUILDERS)
    kinds = {case.get("message") for name in FILES for case in load(name)["cases"]}
    assert kinds - {None} == {kind.__name__ for kind in Message.__args__}  # type: ignore[attr-defined]  # of a union
    assert {case.get("error") for case in load("malformed")["cases"]} == {"DJ303", "DJ304"}
    assert sum(len(load(name)["cases"]) for name in FILES) >= 40
    for name in FILES:
        identifiers = [case["id"] for case in load(name)["cases"]]
        assert len(identifiers) == len(set(identifiers))
        assert load(name)["protocol"] == PROTOCOL_VERSION


@pytest.mark.parametrize(("name", "entry"), [
    pytest.param(name, entry, id=f"{name}-{entry['id']}")
    for name in FILES if (CORPUS / f"{name}.json").exists() for entry in load(name)["cases"]
])
def test_a_frame_of_the_corpus_means_what_it_meant(name: str, entry: dict[str, Any]) -> None:
    assert Case(entry["id"], bytes.fromhex(entry["frame"])).entry() == entry


@pytest.mark.parametrize("name", FILES)
def test_the_same_messages_still_make_the_same_frames(name: str) -> None:
    if os.environ.get("DJINN_UPDATE_WIRE"):
        content = {"protocol": PROTOCOL_VERSION, "cases": [case.entry() for case in BUILDERS[name]()]}
        (CORPUS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    assert [case.entry() for case in BUILDERS[name]()] == load(name)["cases"]
