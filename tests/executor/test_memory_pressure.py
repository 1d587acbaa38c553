"""Servers with less memory than their sessions want."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import clean_environment, run_djinn
from support.servers.connection_options import connect_options

import djinn
from djinn.errors import OutOfMemoryError, ProgramTooLargeError
from djinn.ir.program import ListArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.failures import to_exception
from djinn.wire.messages import Batch, Define, Free, Result, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.client.upload_dedup import reusing
from djinn_plugins.common.memory.upload_digests import digest_of
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect
from djinn_plugins.watch.monitor.reading import Reading, TenantReading, read

CLIENT = "support.clients.decoding"
MIB = 2**20
T, N = TensorArgument(), NumberArgument()


def template(operator: Any, *arguments: Any) -> Template:
    facts = facts_of(operator)
    return Template(facts.name, facts.digest, arguments)


PLUS = Program((template(torch.ops.aten.add.Tensor, T, T),), (Step(0, (-1, -2), 1),), 2, (0,))
FIRST = Program((template(torch.ops.aten.slice.Tensor, T, N, N, N), template(torch.ops.aten.clone.default, T)),
                (Step(0, (-1,), 1), Step(1, (0,), 1)), 1, (1,))
WRITE = Program((template(torch.ops.aten.mul_.Scalar, T, N),), (Step(0, (-1,), 0),), 1, ())
MANY = Program((template(torch.ops.aten.cat.default, ListArgument((T,) * 9)),), (Step(0, (-1,) * 9, 1),), 1, (0,))
DEFINE = [Define(1, PLUS), Define(2, FIRST), Define(3, WRITE), Define(4, MANY)]


def page(server: Any) -> str:
    return next(line.split()[-1] for line in server.log.read_text().splitlines() if "metrics on" in line)


def told(server: Any, true: Callable[[TenantReading], Any], tenant: str = "") -> TenantReading:
    """Wait until the page says what it should."""
    until = time.monotonic() + 10
    while True:
        found: Reading = read(page(server))
        reading = found.tenants.get(tenant, TenantReading())
        if true(reading):
            return reading
        assert time.monotonic() < until, reading
        time.sleep(0.1)


def ask(connection: Any, *commands: Any, tensors: Any = (), fetch: tuple[int, ...] = ()) -> tuple[Result, Any]:
    return connection.request(Batch(list(commands), fetch=fetch, synchronize=True), tensors)


def session(server: Any, token: str = "", owner: str = "") -> SocketConnection:
    connection = connect(server.address, connect_options(token=token, owner=owner))
    ask(connection, *DEFINE)
    return connection


def upload(connection: Any, handle: int, tensor: torch.Tensor) -> Result:
    return ask(connection, Upload(handle, header_of(tensor)), tensors=[tensor])[0]


@pytest.fixture
def clients() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-m", CLIENT, *arguments], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, env=clean_environment()))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_decode_where_there_is_room_for_one_and_a_half(start_server: Any, clients: Any) -> None:
    # Each has 11.0 MB of weights and up to 1.2 MB of keys and values, and needs the latter twice for a moment.
    server = start_server("--memory-mib", "15", "--metrics-port", "0", "--keep-mib", "0", "--isolate", "tenant")
    both = [clients(server.address, str(seed), "20") for seed in (1, 2)]
    assert [client.stdout.readline() for client in both] == ["ready\n"] * 2
    for client in both:
        client.stdin.write("go\n")
        client.stdin.flush()
    reading = told(server, lambda found: found.evictions.get("weight", 0) > 20)
    assert [client.stdout.readline() for client in both] == ["equal\n"] * 2
    assert reading.limit_bytes == 15 * MIB
    assert reading.evictions["active_kv_cache"] == 0
    assert reading.pressure_tier in (0, 1, 2)
    with urllib.request.urlopen(page(server)) as answer:
        text = answer.read().decode()
    restores = next(line for line in text.splitlines() if line.startswith("djinn_memory_restores_total"))
    assert float(restores.split()[-1]) > 20
    moved = [line for line in text.splitlines() if line.startswith("djinn_memory_moved_bytes_total")]
    assert len(moved) == 2
    assert "djinn_memory_pressure_tier" in text
    assert 'djinn_gpu_memory_bytes{kind="kv_cache"' in text


def test_a_thousand_requests_at_one_and_a_half_times_the_room_harm_nobody(
    start_server: Any, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    greedy = tokens.create("greedy", limits=Limits(memory_bytes=8 * MIB))
    calm = tokens.create("calm", limits=Limits(memory_bytes=8 * MIB))
    server = start_server("--tokens", str(tokens.path), "--metrics-port", "0")
    first, other = session(server, greedy), session(server, calm)
    workers = sorted(server.workers)
    assert first.welcome.memory_bytes == 8 * MIB
    made = [torch.full((256, 1024), float(index)) for index in range(12)]
    for handle, tensor in enumerate(made, 1):
        assert not upload(first, handle, tensor).failures
    assert not upload(other, 1, torch.ones(4)).failures
    refused = 0
    for number in range(1000):
        handle = 1 + 5 * number % 12
        if number % 50 == 49:
            result, _ = ask(first, Run(4, (handle,), [], (100,)), Free((100,)))
            assert [failure.kind for failure in result.failures] == ["OutOfMemoryError"]
            refused += 1
            continue
        result, data = ask(first, Run(1, (handle, handle), [], (100,)), Run(2, (100,), [0, 0, 1], (101,)), fetch=(101,))
        assert not result.failures
        assert torch.equal(data[0], 2 * made[handle - 1][:1])
        ask(first, Free((100, 101)))
        if not number % 10:
            result, data = ask(other, Run(1, (1, 1), [], (number + 2,)), Free((number + 2,)), fetch=(1,))
            assert not result.failures
            assert torch.equal(data[0], torch.ones(4))
    assert sorted(server.workers) == workers
    reading = told(server, lambda found: found.held_bytes == 12 * MIB, "greedy")
    assert sum(reading.evictions.values()) > 100
    assert reading.memory_by_kind["moved_to_host"] >= 4 * MIB
    assert not sum(read(page(server)).tenants["calm"].restarts.values())
    assert refused == 20
    for connection in (first, other):
        connection.close()


def test_a_batch_that_cannot_fit_is_told_which_one_would(start_server: Any) -> None:
    server = start_server("--memory-mib", "16", "--max-host-mib", "4")
    djinn.init(server=server.address)
    try:
        weight = torch.eye(1024).to("remote_accelerator:0")

        def loss(batch: int) -> float:
            return (torch.ones(batch, 1024, device=weight.device) @ weight).relu().sum().item()

        with pytest.raises(OutOfMemoryError, match=r"a batch of \d+ % of this one") as raised:
            loss(8192)
        told_part = int(str(raised.value).split("a batch of ")[1].split(" %")[0])
        assert 5 < told_part < 50
        batch = 8192 * told_part // 100
        assert loss(batch) == batch * 1024
        with pytest.raises(OutOfMemoryError):
            loss(2 * batch)
        assert loss(batch) == batch * 1024
    finally:
        djinn.shutdown()


def test_a_step_that_cannot_fit_names_sizes_and_fails_alone(start_server: Any) -> None:
    server = start_server("--memory-mib", "8", "--max-host-mib", "4")
    connection = session(server)
    values = [torch.rand(256, 1024) for _ in range(3)]
    for handle, tensor in enumerate(values, 1):
        upload(connection, handle, tensor)
    both = Program((template(torch.ops.aten.mul_.Scalar, T, N), *MANY.templates), (
        Step(0, (-1,), 0), Step(1, (-1,) * 9, 1)), 1, (0,))
    result, _ = ask(connection, Define(9, both), Run(9, (1,), [2.0], (10,)))
    (failure,) = result.failures
    assert (failure.operator, failure.run, failure.step) == ("aten::cat", 9, 1)
    error = to_exception(failure)
    assert isinstance(error, OutOfMemoryError)
    assert f"{9 * MIB} bytes are wanted, and the limit is {8 * MIB}" in str(error)
    assert f"{3 * MIB} of weight" in str(error)
    result, data = ask(connection, fetch=(1, 2, 3))
    assert not result.failures
    assert all(map(torch.equal, data, [2 * values[0], *values[1:]])), "the write before has happened, as in eager"
    result, data = ask(connection, Run(3, (1,), [2.0], ()), Run(1, (1, 2), [], (11,)), fetch=(11,))
    assert not result.failures
    assert torch.equal(data[0], 4 * values[0] + values[1])
    # 13 MiB where 8 and 4 may be: the last upload finds no room, and takes nothing from the others.
    kinds = [[failure.kind for failure in upload(connection, handle, values[0]).failures] for handle in range(20, 30)]
    assert kinds[-1] == ["OutOfMemoryError"]
    assert kinds[0] == []
    result, data = ask(connection, fetch=(2, 3, 20))
    assert not result.failures
    assert all(map(torch.equal, data, (*values[1:], values[0])))
    connection.close()


@pytest.mark.parametrize("options", [("--memory-mib", "16"), ("--program-mib", "16")], ids=["server", "program"])
def test_what_fits_step_by_step_fits_at_once(options: tuple[str, ...], start_server: Any) -> None:
    server = start_server(*options, "--isolate", "tenant", "--metrics-port", "0")
    other, mine = session(server), torch.rand(4 * MIB // 4)
    upload(other, 1, mine)
    djinn.init(server=server.address)
    size, device = MIB // 2, torch.device("remote_accelerator:0")
    try:
        made = [torch.full((size,), float(number), device=device) for number in range(16)]
        assert [tensor[5].item() for tensor in made] == list(range(16))
        total = torch.zeros(size, device=device)
        for tensor in made:
            total += tensor + 1
        assert total[7].item() == 136, "a chain that reads more than there is room for"
        torch.manual_seed(3)
        drawn = [torch.rand(size, device=device) for _ in range(12)]
        torch.manual_seed(3)
        assert all(torch.equal(tensor.cpu(), torch.rand(size)) for tensor in drawn), "a download of all of them"
        for number in range(8):
            # The server may run ahead of a loop.
            made = [tensor * 0.5 + number for tensor in drawn]
            assert sum(tensor[0] for tensor in made).item() == sum(tensor[0] for tensor in map(torch.Tensor.cpu, made))
        near = [torch.full((size,), float(number), device=device) for number in range(12)]
        lost = near[0].new_zeros(5 * MIB) + 1
        after = [tensor + 1 for tensor in near]
        with pytest.raises((OutOfMemoryError, ProgramTooLargeError)):
            lost.cpu()
        assert [tensor[0].item() for tensor in after] == list(range(1, 13)), "what was recorded beside it is computed"
    finally:
        djinn.shutdown()
    result, data = ask(other, fetch=(1,))
    assert not result.failures
    assert torch.equal(data[0], mine)
    if options[0] == "--memory-mib":
        with urllib.request.urlopen(page(server)) as answer:
            (refused,) = re.findall(r"^djinn_memory_refusals_total\{.*\} (.*)$", answer.read().decode(), re.MULTILINE)
        assert float(refused) == 1, "only what was refused is counted"
    other.close()


def test_what_an_optimizer_keeps_makes_room_before_values_that_are_needed_sooner(start_server: Any) -> None:
    server = start_server("--memory-mib", "24", "--metrics-port", "0", "--keep-mib", "0", "--memory-warning", "0.98",
                          "--memory-critical", "0.99")
    djinn.init(server=server.address)
    local, device = torch.nn.Linear(512, 512, bias=False), torch.device("remote_accelerator:0")
    model = copy.deepcopy(local).to(device)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (local, model)]
    data = torch.randn(8, 512)

    def step() -> None:
        for each, optimizer in zip((local, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(data.to(each.weight.device)).square().sum().backward()
            optimizer.step()

    try:
        older = torch.rand(2 * MIB // 4, device=device)  # cannot be computed again
        wanted = older.cpu()
        for _ in range(5):
            step()
        djinn.synchronize()
        trips = djinn.stats()["round_trips"]
        found = told(server, lambda found: found.memory_by_kind["gradient"])
        assert (found.memory_by_kind["gradient"], found.memory_by_kind["optimizer_state"]) == (MIB, 2 * MIB)
        assert not any(found.evictions.values())
        assert torch.rand(39 * MIB // 8, device=device)[0].item() >= 0  # 1.5 MiB more than there are
        found = told(server, lambda found: found.evictions["optimizer_state"])
        assert found.evictions["optimizer_state"] == 2
        assert (found.evictions["unknown"], found.evictions["gradient"]) == (0, 0), "although they were used before"
        step()
        assert torch.equal(older.cpu(), wanted)
        assert torch.allclose(model.weight.cpu(), local.weight)
        assert djinn.stats()["round_trips"] - trips <= 3, "nothing waits for roles"
    finally:
        djinn.shutdown()


def test_public_contents_serve_every_owner_and_no_others_do(start_server: Any, tmp_path: Path) -> None:
    weight = torch.rand(256, 256)
    newer = weight.clone()
    newer[100, 100] += 1
    digests = tmp_path / "public"
    digests.write_text(f"# the released weights\n{digest_of(header_of(weight), weight).hex()}  # layer.weight\n")
    server = start_server("--keep-mib", "16", "--public-contents", str(digests), "--isolate", "tenant")
    first = reusing(session(server, owner="somebody"))
    for handle, tensor in enumerate((weight, newer), 1):
        upload(first, handle, tensor)
    second = reusing(session(server, owner="somebody else"))
    for handle, tensor in enumerate((weight, newer), 1):
        upload(second, handle, tensor)
    # The same name and form, and other bytes: another content, which is private and had to travel.
    assert second.bytes_not_sent == weight.nbytes
    _, data = ask(second, fetch=(1, 2))
    assert all(map(torch.equal, data, (weight, newer)))
    for connection in (first, second):
        connection.close()


@pytest.mark.parametrize(("options", "said"), [
    (("--memory-warning", "0.9", "--memory-critical", "0.8"), "0.9 and 0.8 are no tiers"),
    (("--public-contents", "/nowhere/at/all"), "cannot be read"),
])
def test_what_makes_no_sense_is_refused(options: tuple[str, ...], said: str) -> None:
    done = run_djinn("serve", *options)
    assert done.returncode == 2
    assert said in done.stderr
