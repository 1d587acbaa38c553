"""What a welcome tells of the device: complete, within its limits, and believed only if it has the right form."""

from __future__ import annotations

import sys

import msgspec
import pytest
from support.processes.warm import run_python

from djinn.errors import ProtocolError
from djinn.wire import messages
from djinn.wire.messages import MAX_FACTS_BYTES, PROTOCOL_VERSION, Hello, Welcome
from djinn_plugins.common.device_report import DeviceProperties, device_of, facts_of_device, summary_of
from djinn_plugins.common.wire.frames import decode_header
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.transport.tcp.greeting import welcomed


def welcome(facts: bytes, device: str = "cuda:0") -> Welcome:
    return Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder, device, "0" * 32, facts=facts)


class Wordy(CpuExecutor):
    def properties(self) -> dict[str, object]:
        return {**super().properties(), "name": "x" * 2000}


def test_an_executor_is_described_as_it_describes_itself() -> None:
    found = device_of(welcome(facts_of_device(CpuExecutor()), "cpu"))
    assert found.kind == "cpu"
    assert 0 < found.free_bytes <= found.total_bytes
    assert not found.attention
    assert not found.cudnn


def test_a_summary_names_the_model_and_its_memory() -> None:
    told = DeviceProperties("cuda", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * 2**30, 16, 9, 0, free_bytes=2**32)
    assert summary_of(told) == "NVIDIA H100 80GB HBM3 MIG 1g.10gb, 4.0 of 10.0 GiB free, compute capability 9.0"
    assert summary_of(DeviceProperties("x", "x:0")) == "x:0"


def test_without_a_description_the_name_of_the_device_tells_its_kind() -> None:
    assert device_of(welcome(b"", "cuda:1")) == DeviceProperties("cuda", "cuda:1")
    assert facts_of_device(Wordy()) == b""


@pytest.mark.parametrize("facts", [
    b"\xc1", b"\x93", msgspec.msgpack.encode(["cuda"]), msgspec.msgpack.encode(["cuda", "x", -1]),
    msgspec.msgpack.encode(["cuda", "x", 0, 0, 0, 0, "yes"]), msgspec.msgpack.encode(["c" * 65, "x"]),
    msgspec.msgpack.encode(["cuda", "x", 0, 0, 9, 0, True, 0, 0, ["fast"]]),
    msgspec.msgpack.encode(["cuda", "x", 0, 0, 9, 0, True, 0, 0, ["flash"] * 9]),
    msgspec.msgpack.encode({"kind": "cuda", "name": "x"}),
])
def test_a_description_of_another_form_ends_the_greeting(facts: bytes) -> None:
    hello = Hello(PROTOCOL_VERSION, "", "", sys.byteorder)
    with pytest.raises(ProtocolError, match="described its device wrongly"):
        welcomed("tcp://h:1", hello, lambda: welcome(facts), None, 1.0)  # type: ignore[arg-type]  # read at once


def test_a_long_description_is_not_read() -> None:
    long = messages.encode(welcome(bytes(MAX_FACTS_BYTES + 1)))
    with pytest.raises(ProtocolError, match="length <= 1024"):
        decode_header(long, 0)


def test_several_threads_read_their_first_facts_at_once() -> None:
    """The form of a structure was worked out by all of them; the process crashed where they met."""
    program = """
import threading, time, typing
import msgspec
from types import SimpleNamespace
from djinn_plugins.common.device_report import DeviceProperties, device_of
facts = [msgspec.msgpack.encode(DeviceProperties("cpu", str(number))) for number in range(8)]
original = typing._AnnotatedAlias.__hash__
def hashed(self):
    time.sleep(0.01)  # others run
    return original(self)
typing._AnnotatedAlias.__hash__ = hashed
threads = [threading.Thread(target=device_of, args=(SimpleNamespace(device="cpu", facts=each),)) for each in facts]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""
    done = run_python(program)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
