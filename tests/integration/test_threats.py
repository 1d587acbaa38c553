"""What a hostile client asks of operators: see docs/threats.md."""

from __future__ import annotations

import ast
import itertools
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.network.frame_feeder import limit_memory, resident_bytes
from support.servers import stand_ins

import djinn.wire
import djinn_plugins.executor
import djinn_plugins.server
import djinn_plugins.transport.tcp
from djinn.errors import TransportError, UnknownOperatorError
from djinn.ir.program import NumberArgument, Program, Step, Template, TensorArgument, TorchArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Free, Poisoned, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")
ONES = torch.ones(4)
CANARY = 0x5EC12E7
EDGES = (0, 1, -1, 3, 2**31, 2**62, 2**63 - 1, -(2**63))


@pytest.fixture
def guarded(start_server: Any) -> Iterator[tuple[Any, SocketConnection]]:
    """A server whose worker may not take much memory, and a session that has four ones as value 1."""
    server = start_server()
    limit_memory(server.workers[0], 2**32)
    connection = connect(server.address, ConnectOptions())
    connection.request(Batch([Upload(1, header_of(ONES))], synchronize=True), [ONES])
    yield server, connection
    connection.close()


def calls(*steps: tuple[str, tuple[Any, ...], tuple[int, ...]], inputs: int, program: int = 1) -> Define:
    """A program of operators with their arguments and operands, of which each gives one result; the last is kept."""
    templates = tuple(Template(name, digest_of(name), arguments) for name, arguments, _ in steps)
    made = tuple(Step(index, operands, 1) for index, (_, _, operands) in enumerate(steps))
    return Define(program, Program(templates, made, inputs, (len(steps) - 1,)))


def digest_of(name: str) -> str:
    try:
        return facts_of(operator_named(name)).digest
    except UnknownOperatorError:
        return "0" * 16


def outcome(connection: SocketConnection, define: Define, inputs: tuple[int, ...] = (),
            numbers: tuple[Any, ...] = ()) -> tuple[Any, str]:
    """What comes of running a program: the item of its result, and the kind of its failure."""
    result, _ = connection.request(
        Batch([define, Run(define.program, inputs, list(numbers), (9,))], describe=(9,)), ())
    connection.submit(Batch([Free((9,))]), ())
    return result.items[0], result.failures[0].kind if result.failures else ""


@linux
def test_strides_and_offsets_that_lie_never_reach_memory(guarded: tuple[Any, SocketConnection]) -> None:
    server, connection = guarded
    workers = server.workers
    reached = 0
    numbers = (NumberArgument(),) * 3
    # A view, of which no element is read.
    define = calls(("aten::as_strided", (TensorArgument(), *numbers), (-1,)), inputs=1)
    for size, stride, offset in itertools.product(EDGES, repeat=3):
        item, kind = outcome(connection, define, (1,), ([size], [stride], offset))
        fits = size >= 0 and stride >= 0 and offset >= 0 and (size == 0 or offset + (size - 1) * stride < 4)
        assert fits or isinstance(item, Poisoned), (size, stride, offset)
        assert kind or fits
        reached += not kind
    assert reached > 3
    assert server.workers == workers


@linux
def test_a_small_sparse_tensor_that_declares_terabytes_is_an_error_at_once(
    guarded: tuple[Any, SocketConnection],
) -> None:
    server, connection = guarded
    (worker,) = server.workers
    indices = torch.zeros(2, 1, dtype=torch.int64)
    connection.request(Batch([Upload(2, header_of(indices)), Upload(3, header_of(ONES[:1]))], synchronize=True),
                       [indices, ONES[:1]])
    bomb = calls(("aten::sparse_coo_tensor.indices_size",
                  (TensorArgument(), TensorArgument(), NumberArgument()), (-1, -2)),
                 ("aten::to_dense", (TensorArgument(),), (0,)), inputs=2)
    outcome(connection, bomb, (2, 3), ([2**20, 2**20],))
    before = resident_bytes(worker)
    began = time.monotonic()
    item, kind = outcome(connection, bomb, (2, 3), ([2**20, 2**20],))
    took_s = time.monotonic() - began
    assert isinstance(item, Poisoned)
    assert kind
    assert took_s < 2
    assert resident_bytes(worker) - before < 16 * 2**20
    assert server.workers == [worker]


@linux
def test_a_program_that_ends_its_process_takes_its_own_worker_only(start_server: Any, tmp_path: Path) -> None:
    """A stand-in for a kernel with a fault that nobody knows yet."""
    server = start_server("--allow-namespace", stand_ins.NAMESPACE, PYTHONPATH=stand_ins.installed(tmp_path / "plugin"))
    (worker,) = server.workers
    connection = connect(server.address, ConnectOptions())
    connection.request(Batch([Upload(1, header_of(ONES))], synchronize=True), [ONES])
    with pytest.raises(TransportError):
        outcome(connection, calls((f"{stand_ins.NAMESPACE}::ends", (TensorArgument(),), (-1,)), inputs=1), (1,))
    again = connect(server.address, ConnectOptions(connect_timeout_s=60))
    again.request(Batch([Upload(1, header_of(ONES))], synchronize=True), [ONES])
    again.close()
    connection.close()
    assert server.process.poll() is None
    assert worker not in server.workers


UNCHECKED = sorted({schema.name for schema in torch._C._jit_get_all_schemas()
                    if re.fullmatch(r"aten::_sparse_\w+_unsafe", schema.name)})
ON_FILES = sorted({f"{schema.name}.{schema.overload_name}".rstrip(".") for schema in torch._C._jit_get_all_schemas()
                   if any(re.search("file|path|url", argument.name) for argument in schema.arguments)
                   and not schema.name.startswith("djinn::")} - {"aten::einsum"})
"""The path of einsum is an order of contractions; djinn's own operators have a test of their own."""


def test_the_operators_that_touch_files_are_known() -> None:
    """Another release of PyTorch may have more: then somebody has to look at them."""
    assert ON_FILES == ["aten::from_file", "aten::from_file.out", "aten::save"]
    assert len(UNCHECKED) == 6


@pytest.mark.parametrize("name", [*ON_FILES, *UNCHECKED])
def test_operators_that_touch_files_or_check_nothing_are_not_run(server: Any, name: str) -> None:
    connection = connect(server.address, ConnectOptions())
    item, kind = outcome(connection, calls((name, (), ()), inputs=0))
    assert isinstance(item, Poisoned)
    assert kind == "UnknownOperatorError"
    connection.close()


def test_nothing_is_compressed_on_the_wire() -> None:
    read = 0
    for package in (djinn.wire, djinn_plugins.executor, djinn_plugins.transport.tcp, djinn_plugins.server):
        for path in Path(package.__path__[0]).rglob("*.py"):
            read += 1
            names = {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)
                     for alias in node.names}
            assert not names & {"zlib", "gzip", "bz2", "lzma", "zstandard", "lz4", "snappy"}, path
    assert read > 30


@linux
def test_memory_that_one_tenant_has_written_is_not_seen_by_another(start_server: Any, tmp_path: Any) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    mallory, alice = tokens.create("mallory"), tokens.create("alice")
    server = start_server("--tokens", str(tokens.path))
    secret = torch.full((2**20,), CANARY, dtype=torch.int32)
    victim = connect(server.address, ConnectOptions(token=alice, connect_timeout_s=60))
    victim.request(Batch([Upload(1, header_of(secret))], synchronize=True), [secret])
    spy = connect(server.address, ConnectOptions(token=mallory, connect_timeout_s=60))
    victim.close()
    choose = random.Random(0)
    name = "aten::empty.memory_format"
    template = Template(name, digest_of(name), (NumberArgument(),), (("dtype", TorchArgument("dtype", "int32")),))
    define = Define(1, Program((template,), (Step(0, (), 1),), 0, (0,)))
    for _ in range(50):
        size = choose.choice([2**20, 2**16, 2**12, 100])
        result, data = spy.request(Batch([define, Run(1, (), [[size]], (9,))], fetch=(9,)), ())
        assert not result.failures
        assert data[0].numel() == size
        assert int((data[0] == CANARY).sum()) == 0
    spy.close()


@linux
def test_greetings_and_leavings_by_the_thousand_do_not_hold_up_others(server: Any) -> None:
    """There is no message that cancels; to leave is the nearest to it, and what runs then still counts."""
    bystander = connect(server.address, ConnectOptions())
    bystander.request(Batch(synchronize=True), ())
    taken = []
    for _ in range(200):
        storm = connect(server.address, ConnectOptions())
        storm.submit(Batch([Upload(1, header_of(ONES))]), [ONES])
        storm.close()
        began = time.perf_counter()
        bystander.request(Batch(synchronize=True), ())
        taken.append(time.perf_counter() - began)
    assert sorted(taken)[len(taken) // 2] < 0.05
    bystander.close()

