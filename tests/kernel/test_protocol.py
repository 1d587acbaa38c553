"""The protocol core: every message survives the wire, and no bytes do harm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from djinn.errors import ProtocolError, ProtocolVersionError, UnsupportedTensorError
from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import (
    MAX_NESTING,
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
    Welcome,
    from_wire,
    to_wire,
)
from djinn.wire.tensors import DTYPES, header_of
from djinn_plugins.common.calls.program_check import check_program
from djinn_plugins.common.memory.tensor_bytes import buffer_of, empty_from, size_bytes
from djinn_plugins.common.wire import short_messages
from djinn_plugins.common.wire.frames import (
    ALIGNMENT,
    HEAD,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    FrameHeader,
    body_length,
    decode_head,
    decode_header,
    encode_head,
    head_bytes,
    head_for,
    tensor_headers,
)

thorough = settings(deadline=None, max_examples=300)
handles = st.integers(0, 2**64 - 1)
texts = st.text(max_size=20)
keys = st.binary(max_size=16)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
lifted = st.recursive(numbers | st.complex_numbers(allow_nan=False), lambda inner: st.lists(inner, max_size=3),
                      max_leaves=5)
arguments = st.recursive(
    st.just(TensorArgument()) | st.just(NumberArgument())
    | st.builds(ConstantArgument, st.none() | st.booleans() | texts) | st.builds(TorchArgument, texts, texts),
    lambda inner: st.builds(ListArgument, st.lists(inner, max_size=3).map(tuple)), max_leaves=6)
templates = st.builds(Template, texts, texts, st.lists(arguments, max_size=3).map(tuple),
                      st.lists(st.tuples(texts, arguments), max_size=2).map(tuple))
tuples_of_handles = st.lists(handles, max_size=4).map(tuple)
changes = st.dictionaries(st.integers(0, 2**32), handles, max_size=3)
steps = st.builds(Step, st.integers(-1, 4), st.lists(st.integers(-3, 6), max_size=4).map(tuple), st.integers(-1, 3))
programs = st.builds(Program, st.lists(templates, max_size=3).map(tuple), st.lists(steps, max_size=4).map(tuple),
                     st.integers(0, 3), st.lists(st.integers(-1, 5), max_size=3).map(tuple))


@st.composite
def tensor_headers_of_anything(draw: st.DrawFn) -> TensorHeader:
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    order = draw(st.permutations(range(len(size))))
    stride, step = [0] * len(size), 1
    for dimension in order:
        stride[dimension], step = step, step * size[dimension]
    return TensorHeader(draw(st.sampled_from(sorted(DTYPES))), size, tuple(stride))


described = tensor_headers_of_anything()
commands = (
    st.builds(Define, handles, programs) | st.builds(Forget, tuples_of_handles) | st.builds(Upload, handles, described)
    | st.builds(Run, handles, tuples_of_handles, st.lists(lifted, max_size=3).map(to_wire), tuples_of_handles,
                tuples_of_handles)
    | st.builds(RunDelta, handles, changes, st.dictionaries(st.integers(0, 99), lifted.map(to_wire), max_size=3),
                changes,
                changes)
    | st.builds(Copy, st.lists(st.tuples(handles, handles, handles), max_size=3).map(tuple))
    | st.builds(UploadByDigest, handles, st.binary(min_size=32, max_size=32))
    | st.builds(Seed, st.integers(-(2**63), 2**64 - 1)) | st.builds(Free, tuples_of_handles)
    | st.builds(Peer, handles, texts, st.binary(min_size=16, max_size=16)) | st.builds(Send, handles, handles, handles,
                                                                                         tuples_of_handles)
    | st.builds(Receive, handles, handles, texts, tuples_of_handles)
)
plain = st.none() | st.booleans() | numbers | texts
items = (
    described | st.builds(Plain, plain | st.lists(plain, max_size=3)) | st.builds(Poisoned, st.integers(1, 2**32))
    | st.builds(Description, texts, st.lists(st.integers(0, 9), max_size=3).map(tuple),
                st.lists(st.integers(-9, 9), max_size=3).map(tuple), st.integers(0, 9))
)
failures = st.builds(Failure, st.integers(1, 2**32), texts, texts, texts, st.integers(-1, 99), st.integers(-1, 99),
                     texts, st.integers(0, 2**32))
times = st.integers(-(2**63), 2**63 - 1)
timings = st.builds(Timing, st.sampled_from(["run", "send", "receive", "upload"]), handles, times, times)
sizes = st.lists(st.integers(0, 2**63), max_size=4).map(tuple)
MESSAGES: dict[type[Any], st.SearchStrategy[Any]] = {
    Hello: st.builds(Hello, st.integers(0, 2**32), texts, texts, texts, texts, texts, texts, texts, st.booleans(),
                     keys, handles),
    Redirect: st.builds(Redirect, texts, texts),
    Welcome: st.builds(Welcome, st.integers(0, 2**32), texts, texts, texts, texts, texts, st.integers(-1, 2**32),
                       st.binary(max_size=16), handles, handles, st.integers(0, 2**32), keys, st.floats(0, 3600),
                       handles),
    Refusal: st.builds(Refusal, texts, texts, texts, st.floats(0, 3600)),
    Ack: st.builds(Ack),
    Starting: st.builds(Starting, st.floats(0, 1e6)),
    Goodbye: st.builds(Goodbye),
    Batch: st.builds(Batch, st.lists(st.builds(RunDelta, handles), min_size=1, max_size=5), tuples_of_handles)
    | st.builds(Batch, st.lists(commands, max_size=5), tuples_of_handles, tuples_of_handles, st.booleans(),
                     st.booleans(), st.sampled_from(ExecutionPhase), st.booleans()),
    PeerHello: st.builds(PeerHello, st.integers(0, 2**32), texts, st.binary(min_size=16, max_size=16), texts),
    ValueTransfer: st.builds(ValueTransfer, handles, st.none() | described | st.builds(Plain, plain),
                             st.none() | st.builds(Layout, sizes, sizes, st.booleans()), st.none() | failures),
    Result: st.builds(Result, st.lists(items, max_size=5).map(tuple), run_ns=handles, since=handles,
                      assumes=st.binary(min_size=1, max_size=32))
    | st.builds(Result, st.lists(items, max_size=5).map(tuple), st.lists(failures, max_size=3).map(tuple),
                      st.lists(timings, max_size=3).map(tuple), times, handles),
}
any_message = st.one_of(*MESSAGES.values())


def frame_of(message: Message, sequence: int = 1) -> bytes:
    header = short_messages.encode(message)
    return head_for(message, sequence, len(header), body_length(tensor_headers(message))) + header


def decode(data: bytes) -> Message:
    """Decode as a transport does, without the body."""
    size = head_bytes(data[0]) if data else 0
    head = decode_head(data[:size])
    return decode_header(data[size:size + head.header_bytes], head.body_bytes)


def test_every_message_is_generated() -> None:
    assert set(MESSAGES) == set(Message.__args__)  # type: ignore[attr-defined]  # the members of a union


@pytest.mark.parametrize("kind", list(MESSAGES))
def test_every_message_survives_the_wire(kind: type[Any]) -> None:
    @thorough
    @given(MESSAGES[kind], st.integers(0, 2**64 - 1))
    def survives(message: Message, sequence: int) -> None:
        data = frame_of(message, sequence)
        size = head_bytes(data[0])
        assert decode_head(data[:size]) == FrameHeader(
            sequence, len(data) - size, body_length(tensor_headers(message)))
        again = decode(data)
        assert type(again) is kind
        assert again == message
        assert short_messages.encode(again) == data[size:]

    survives()


def test_a_loop_repeats_few_bytes() -> None:
    asks = Batch([RunDelta(9)], fetch=(71_106,))
    early = Result((Plain(value=False),), assumes=bytes(16), since=577)
    assert [len(frame_of(message, 577)) for message in (Batch([RunDelta(6)]), asks, early)] == [14, 19, 42]


@pytest.mark.parametrize("message", [
    Batch(), Batch([RunDelta(1, released={0: 1})]), Batch([RunDelta(1), Free((1,))]), Batch([RunDelta(1)], later=(1,)),
    Batch([RunDelta(1)], synchronize=True), Result(assumes=bytes(16), failures=(Failure(1, "", ""),))], ids=repr)
def test_what_says_more_is_not_shortened(message: Message) -> None:
    assert short_messages.encode(message) == messages.encode(message)
    assert short_messages.decode(messages.encode(message)) == message


@thorough
@given(lifted)
def test_lifted_numbers_survive_the_wire(value: Any) -> None:
    encoded = msgspec.msgpack.encode(to_wire(value))
    assert from_wire(msgspec.msgpack.decode(encoded)) == value


@thorough
@given(st.data())
def test_mutated_frames_are_refused_or_understood(data: st.DataObject) -> None:
    frame = bytearray(frame_of(data.draw(any_message)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frame)))
        removed = data.draw(st.integers(0, 8))
        frame[position:position + removed] = data.draw(st.binary(max_size=8))
    try:
        message = decode(bytes(frame))
    except ProtocolError:
        return
    for header in tensor_headers(message):
        assert size_bytes(header) < 2**63


@thorough
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
@example(b"", 0)
@example(b"\xdd\xff\xff\xff\xff", 0)
@example(b"\xdf\xff\xff\xff\xff", 0)
@example(b"\xc6\xff\xff\xff\xff", 0)
@example(b"\x91" * 100_000, 0)
@example(b"\x81\xa4type\x91", 0)
def test_random_headers_are_refused_or_understood(header: bytes, body_bytes: int) -> None:
    try:
        message = decode_header(header, body_bytes)
    except ProtocolError:
        return
    assert isinstance(message, tuple(MESSAGES))


anything = st.recursive(
    st.none() | st.booleans() | numbers | st.binary(max_size=5)
    | st.sampled_from(["batch", "result", "type", "hello", "upload", "tensor", "run", "define", "t", "l", "float32"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(
        st.sampled_from(["type", "commands", "fetch", "describe", "items", "failures", "protocol"]), inner, max_size=5),
    max_leaves=20)


@thorough
@given(anything)
def test_headers_of_any_msgpack_are_refused_or_understood(value: Any) -> None:
    try:
        message = decode_header(msgspec.msgpack.encode(value), 0)
    except ProtocolError:
        return
    assert isinstance(message, tuple(MESSAGES))


@thorough
@given(programs)
def test_programs_are_checked_and_nothing_else_is_raised(program: Program) -> None:
    try:
        check_program(program)
    except ProtocolError:
        return
    produced = sum(step.results for step in program.steps)
    assert all(0 <= index < produced for index in program.keep)
    assert all(0 <= step.template < len(program.templates) for step in program.steps)


def test_arguments_nested_too_deeply_are_refused() -> None:
    argument: Any = TensorArgument()
    for _ in range(MAX_NESTING + 1):
        argument = ListArgument((argument,))
    program = Program((Template("aten::cat", "", (argument,)),), (Step(0, (-1,), 1),), 1, (0,))
    with pytest.raises(ProtocolError, match="nested"):
        check_program(program)


@pytest.mark.parametrize("length", [0, 1, HEAD.size - 1, HEAD.size + 1])
def test_a_head_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"not {length}"):
        decode_head((encode_head(1, 1, 1) + b"x")[:length])


@pytest.mark.parametrize(("fields", "kind"), [
    ((b"DJNM", PROTOCOL_VERSION, 0, 1, 0, 0, 0), ProtocolError),
    ((MAGIC, 0, 0, 1, 0, 0, 0), ProtocolVersionError),
    ((MAGIC, PROTOCOL_VERSION + 1, 0, 1, 0, 0, 0), ProtocolVersionError),
    ((MAGIC, PROTOCOL_VERSION, 1, 1, 0, 0, 0), ProtocolError),
    ((MAGIC, PROTOCOL_VERSION, 0, 1, 0, 1, 0), ProtocolError),
    ((MAGIC, PROTOCOL_VERSION, 0, 1, MAX_HEADER_BYTES + 1, 0, 0), ProtocolError),
    ((MAGIC, PROTOCOL_VERSION, 0, 1, 0, 0, MAX_BODY_BYTES + 1), ProtocolError),
])
def test_heads_that_are_refused(fields: tuple[Any, ...], kind: type[ProtocolError]) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_head(HEAD.pack(*fields))
    assert type(caught.value) is kind


def test_the_limits_themselves_are_allowed() -> None:
    largest = FrameHeader(1, MAX_HEADER_BYTES, MAX_BODY_BYTES)
    assert decode_head(encode_head(1, MAX_HEADER_BYTES, MAX_BODY_BYTES)) == largest


@pytest.mark.parametrize("header", [
    TensorHeader("object", (1,), (1,)),
    TensorHeader("quint8", (1,), (1,)),
    TensorHeader("float32", (2, 2), (1, 1)),
    TensorHeader("float32", (2, 2), (3, 1)),
    TensorHeader("float32", (3,), (0,)),
    TensorHeader("float32", (3,), (1, 1)),
    TensorHeader("float32", (2**40, 2**40), (2**40, 1)),
    TensorHeader("float32", (2**63, 0), (1, 1)),
    TensorHeader("float32", (0,), (2**63,)),
])
def test_tensors_that_cannot_be_are_refused(header: TensorHeader) -> None:
    message = Batch([Upload(1, header)])
    with pytest.raises(ProtocolError):
        decode_header(messages.encode(message), 64)


@pytest.mark.parametrize("body_bytes", [0, 63, 65, 128])
def test_a_body_of_another_length_than_its_tensors_is_refused(body_bytes: int) -> None:
    message = Result((TensorHeader("float32", (3,), (1,)),))
    assert decode_header(messages.encode(message), ALIGNMENT) == message
    with pytest.raises(ProtocolError, match="announces 64 bytes"):
        decode_header(messages.encode(message), body_bytes)


@thorough
@given(described)
def test_a_tensor_is_rebuilt_from_its_header(header: TensorHeader) -> None:
    tensor = empty_from(header)
    assert header_of(tensor) == header
    assert len(buffer_of(tensor)) == size_bytes(header) == tensor.nbytes
    assert body_length([header]) % ALIGNMENT == 0


def test_tensors_without_a_meaning_on_the_wire_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError):
        header_of(torch.eye(2).to_sparse())
