"""One program does not stop a server, and the operator can end what does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.long_work import ENDLESS, LONG, SHORT, Working
from support.processes.warm import WarmPython
from support.servers.serving import Serving

import djinn
from djinn.errors import ProgramTimeoutError, RefusedError, SessionTerminatedError, TransportError
from djinn.wire.messages import Batch
from djinn_plugins.server.operator_socket import ask, servers
from djinn_plugins.server.tokens.tokens import TokenFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")
SYNCHRONIZE = Batch(synchronize=True)
COMMAND = "from djinn_plugins.cli.app import main\nmain()\n"
DEATHS = 5


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    yield
    djinn.shutdown()


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Serving]:
    """A server that lets programs run for a second."""
    with Serving(tmp_path / "log", "--control", str(tmp_path / "control"), "--max-run-s", "1") as running:
        running.control = tmp_path / "control"
        yield running


@pytest.fixture
def operated(tmp_path: Path) -> Iterator[Serving]:
    """A server that the operator reaches."""
    with Serving(tmp_path / "log", "--control", str(tmp_path / "control"), "--max-run-s", "0") as running:
        running.control = tmp_path / "control"
        yield running


def wait_until(true: Callable[[], Any], patience_s: float = 60) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def works(session: Working) -> bool:
    before = session.counted()
    session.submit(SHORT)
    return session.counted() == before + 1


def test_a_program_that_runs_too_long_ends_with_its_session(strict: Serving) -> None:
    innocent, offender = Working(strict.address, side=64), Working(strict.address, side=64)
    (worker,) = strict.workers
    offender.submit(ENDLESS)
    began = time.monotonic()
    with pytest.raises(ProgramTimeoutError, match=f"session {offender.name[:12]} ran for longer than 1 s"):
        offender.connection.request(SYNCHRONIZE, ())
    took_s = time.monotonic() - began
    wait_until(lambda: strict.workers not in ([], [worker]), 60)
    with pytest.raises(TransportError):
        innocent.connection.request(SYNCHRONIZE, ())
    # The kernel was not to be interrupted, so it has cost the worker; whoever comes next finds another one.
    another = Working(strict.address, side=64)
    assert works(another)
    another.close()
    assert took_s < 15
    assert strict.log.read_text().count("its program has run for") == 1


def test_the_limit_of_programs_is_reloaded_and_counts_for_those_that_run(start_server: Any, tmp_path: Path) -> None:
    config = tmp_path / "djinn.toml"
    config.write_text("max-run-s = 0\n")
    server = start_server("--config", str(config))
    offender = Working(server.address, side=64)
    offender.submit(ENDLESS)
    config.write_text("max-run-s = 1\n")
    server.process.send_signal(signal.SIGHUP)
    with pytest.raises(ProgramTimeoutError, match="ran for longer than 1 s"):
        offender.connection.request(SYNCHRONIZE, ())


def test_a_program_that_can_end_between_its_steps_costs_no_other_session_anything(strict: Serving) -> None:
    innocent, offender = Working(strict.address, side=64), Working(strict.address, side=1500)
    workers = strict.workers
    for _ in range(3):
        offender.submit(LONG)
    with pytest.raises(ProgramTimeoutError):
        offender.connection.request(SYNCHRONIZE, ())
    assert works(innocent)
    assert strict.workers == workers
    innocent.close()


def test_recovery_does_not_run_again_what_ran_too_long(strict: Serving) -> None:
    djinn.init(server=strict.address, recovery="replay", log_level="ERROR")
    kept = torch.arange(4.0, device="remote_accelerator:0") + 1
    assert kept.sum().item() == 10
    with pytest.raises(ProgramTimeoutError):
        torch.zeros(1, device="remote_accelerator:0").expand(2**40).sum().item()
    with pytest.raises(ProgramTimeoutError):
        kept.cpu()
    assert strict.log.read_text().count("its program has run for") == 1
    djinn.init(server=strict.address, recovery="replay", log_level="ERROR")
    assert torch.ones(2, device="remote_accelerator:0").sum().item() == 2


def test_a_worker_that_cannot_speak_is_ended_all_the_same_and_its_client_learns_why(strict: Serving) -> None:
    """As one whose kernel holds the interpreter's lock: it is stopped while its program runs."""
    offender = Working(strict.address, side=64)
    (worker,) = strict.workers
    offender.submit(ENDLESS)
    wait_until(lambda: sessions(strict)[offender.name]["running_s"] > 0)
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(ProgramTimeoutError, match="ran for longer than 1 s"):
        offender.connection.request(SYNCHRONIZE, ())
    wait_until(lambda: worker not in strict.workers)


def sessions(server: Any) -> dict[str, dict[str, Any]]:
    return {row["session"]: row for row in ask(server.control, "sessions")}


def run_command(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    log = tmp_path / "command"
    with WarmPython(COMMAND, list(arguments), environment={**os.environ, **environment}, log=log,
                    has_djinn=True) as process:
        said = process.stdout.read()
        return process.wait(60), said, log.read_text()


def test_the_operator_sees_sessions_and_ends_them(operated: Any, tmp_path: Path) -> None:
    assert stat.S_IMODE(operated.control.stat().st_mode) == 0o600
    idle, busy = Working(operated.address, side=64), Working(operated.address, side=64)
    (worker,) = operated.workers
    busy.submit(ENDLESS)
    wait_until(lambda: sessions(operated)[busy.name]["running_s"] > 0)
    seen = sessions(operated)
    assert set(seen) == {idle.name, busy.name}
    assert seen[busy.name]["queued"] == 1
    assert seen[idle.name]["queued"] == 0
    assert seen[idle.name]["running_s"] == 0
    assert seen[idle.name]["worker"] == worker
    assert seen[idle.name]["held_bytes"] >= 64 * 64 * 4
    assert seen[idle.name]["idle_s"] > 0
    assert (bool(seen[busy.name]["program"]), seen[idle.name]["program"]) == (True, "")
    assert seen[busy.name]["idle_s"] == 0
    status, said, _ = run_command(tmp_path, "sessions", "--json", "--control", str(operated.control))
    assert status == 0
    assert {row["session"] for row in json.loads(said)} == set(seen)
    status, said, _ = run_command(tmp_path, "sessions", "--control", str(operated.control))
    assert {line.split("\t")[1] for line in said.splitlines()} == set(seen)

    status, said, _ = run_command(tmp_path, "kick", idle.name[:6], "--control", str(operated.control))
    assert (status, said) == (0, f"{idle.name[:6]}: 1 session ended\n")
    with pytest.raises(SessionTerminatedError, match="operator has ended this session"):
        idle.connection.request(SYNCHRONIZE, ())
    assert set(sessions(operated)) == {busy.name}
    assert operated.workers == [worker]

    # Its kernel cannot be interrupted.
    said = ask(operated.control, "kick", target=busy.name, wait_s=0.5, keeps_worker=True)
    assert said == {"sessions": 1, "worker": 0, "remains": busy.name}
    assert operated.workers == [worker]
    said = ask(operated.control, "kick", target=busy.name, wait_s=0.5)
    assert said == {"sessions": 1, "worker": worker, "remains": ""}
    with pytest.raises(SessionTerminatedError):
        busy.connection.request(SYNCHRONIZE, ())
    wait_until(lambda: operated.workers not in ([], [worker]), 60)
    status, _, errors = run_command(tmp_path, "kick", "nobody", "--control", str(operated.control))
    assert status == 2
    assert "neither a tenant nor a session 'nobody'" in errors


def test_the_operator_finds_servers_by_themselves(start_server: Any, tmp_path: Path) -> None:
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "djinn").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "djinn" / f"{2**22 + 1}.sock"))  # no process has such a number
    server = start_server(**runtime)
    (path,) = (tmp_path / "djinn").iterdir()
    assert path.name == f"{server.process.pid}.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    session = Working(server.address, side=64)
    status, said, errors = run_command(tmp_path, "sessions", **runtime)
    assert status == 0, errors
    assert said.split("\t")[1] == session.name
    session.close()
    assert server.stop() == 0
    assert not path.exists()


def test_a_socket_that_vanishes_hides_no_other_and_that_of_a_dead_server_is_removed(tmp_path: Path) -> None:
    (tmp_path / "vanished.sock").symlink_to(tmp_path / "nowhere")  # it is listed, and cannot be looked at
    stale = tmp_path / f"{os.getpid()}.sock"  # the number of the dead server belongs to another process now
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as killed:
        listening.bind(str(tmp_path / "1.sock"))
        listening.listen()
        killed.bind(str(stale))
        assert list(servers(tmp_path)) == [tmp_path / "1.sock"]
        assert stale.exists(), "a server that begins to listen is left alone"
        os.utime(stale, (0, 0))
        assert list(servers(tmp_path)) == [tmp_path / "1.sock"]
        assert not stale.exists()


def test_a_tenant_is_ended_whole_and_others_are_not(start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "state" / "tokens.json")
    alice, bob = tokens.create("alice"), tokens.create("bob")
    server = start_server("--tokens", str(tokens.path), "--control", str(tmp_path / "control"))
    of_alice = [Working(server.address, alice, side=64) for _ in range(2)]
    of_bob = Working(server.address, bob, side=64)
    of_alice[0].submit(ENDLESS)
    said = ask(tmp_path / "control", "kick", target="alice", wait_s=1)
    assert said["sessions"] == 2
    for session in of_alice:
        with pytest.raises(SessionTerminatedError):
            session.connection.request(SYNCHRONIZE, ())
    assert works(of_bob)
    again = Working(server.address, alice, side=64)
    assert works(again)
    assert len(server.workers) == 2
    for session in (of_bob, again):
        session.close()


def test_whose_programs_kill_the_worker_waits_and_others_do_not(operated: Any) -> None:
    offender = "o" * 40

    def let_in() -> Working | None:
        with suppress(RefusedError):
            return Working(operated.address, side=64, owner=offender)
        return None

    for times in range(1, DEATHS + 1):
        bad = wait_until(let_in)
        (worker,) = operated.workers
        bad.submit(ENDLESS)
        wait_until(lambda: sessions(operated)[bad.name]["running_s"] > 0)  # noqa: B023  # called at once
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: operated.log.read_text().count("whose client waits") == times)  # noqa: B023  # as above
        bad.vanish()
    # Long enough by now for this to come in time.
    with pytest.raises(RefusedError, match=f"worker has died {DEATHS} times in a row while it ran"):
        Working(operated.address, side=64, owner=offender)
    good = Working(operated.address, side=64, owner="g" * 40)
    assert works(good)
    good.close()
    log = operated.log.read_text()
    assert re.findall(r"whose client waits ([\d.]+) s", log) == [f"{0.2 * 2 ** index:g}" for index in range(DEATHS)]
    assert re.findall(r"another worker starts in ([\d.]+) s", log) == ["0.2"] * DEATHS


def test_sessions_and_programs_have_a_bound_by_default(start_server: Callable[..., Any]) -> None:
    from support.processes.long_work import products

    from djinn.wire.messages import Define

    server = start_server("--max-programs", "10", "--max-sessions", "2")
    first, second = Working(server.address, side=64), Working(server.address, side=64)
    with pytest.raises(RefusedError, match="DJ312"):
        Working(server.address, side=64, connect_timeout_s=2)
    first.connection.request(Batch([Define(number, products(1)) for number in range(10, 17)], synchronize=True), ())
    with pytest.raises(RefusedError, match=r"\[DJ312\] The session would have 11 programs; the limit is 10"):
        first.connection.request(Batch([Define(20, products(1))], synchronize=True), ())
    assert works(second)
    second.close()
