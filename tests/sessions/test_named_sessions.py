"""Named sessions: what one process keeps is there for the next, over a served worker, also if the first was killed."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import WarmPython, clean_environment, run_djinn, run_python

import djinn
from djinn.errors import ConfigurationError, RefusedError
from djinn_plugins.server.tokens.tokens import TokenFile

DEVICE = "remote_accelerator:0"
FIRST = """
import sys, time, torch, djinn
djinn.init(server=sys.argv[1], name="lab")
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)).to("remote_accelerator:0")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.ones(8, 64, device="remote_accelerator:0")).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
djinn.kept["model"] = model.state_dict()
djinn.kept["training"] = {"optimizer": optimizer.state_dict(), "step": 4, "names": ("a", None, 0.5)}
whole = torch.arange(24.0, device="remote_accelerator:0").to(torch.bfloat16).view(4, 6)
djinn.kept["views"] = [whole.t(), whole[1:3, ::2]]
djinn.kept["whole"] = whole
whole.mul_(2)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
print("kept", flush=True)
if len(sys.argv) > 3:
    time.sleep(600)
"""
SECOND = """
import sys, torch, djinn
djinn.init(server=sys.argv[1], name="lab")
assert sorted(djinn.kept) == ["model", "training", "views", "whole"], list(djinn.kept)
before = djinn.stats()["bytes_received"]
there, local = djinn.kept["model"], torch.load(sys.argv[2])
assert list(there) == list(local["model"])
assert djinn.stats()["bytes_received"] - before < 10_000, "the values stay where they are"
for name, tensor in local["model"].items():
    assert there[name].device.type == "remote_accelerator" and torch.equal(there[name].cpu(), tensor.cpu()), name
state = djinn.kept["training"]
assert state["step"] == 4 and state["names"] == ("a", None, 0.5)
for number, values in local["optimizer"]["state"].items():
    for name, tensor in values.items():
        kept = state["optimizer"]["state"][number][name]
        assert kept.device.type == ("cpu" if name == "step" else "remote_accelerator")
        assert torch.equal(kept.cpu(), tensor.cpu())
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
model.load_state_dict(there, assign=True)
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(state["optimizer"])
model(torch.ones(8, 64, device="remote_accelerator:0")).square().mean().backward()
optimizer.step()
turned, part = djinn.kept["views"]
assert turned.stride() == (1, 6) and part.stride() == (6, 2) and part.storage_offset() == 6
whole = djinn.kept["whole"]
assert whole.dtype is torch.bfloat16 and torch.equal(whole.cpu(), 2 * torch.arange(24.0).to(torch.bfloat16).view(4, 6))
part.zero_()
expected = 2 * torch.arange(24.0).view(4, 6)
expected[1:3, ::2] = 0
assert torch.equal(whole.float().cpu(), expected) and torch.equal(turned.float().cpu(), expected.t())
assert djinn.kept["whole"] is not None and len(djinn.kept) == 4
del djinn.kept["training"]
print("equal", djinn.stats()["live_handles"] >= 0)
"""


FLUSHED = """
import os, signal, sys, torch, djinn
djinn.init(server=sys.argv[1], name="flushed")
counter = torch.zeros((), dtype=torch.int64, device="remote_accelerator:0")
djinn.kept["counter"] = counter
factor = torch.full((300, 300), 1 / 300, device="remote_accelerator:0")
djinn.synchronize()
for _ in range(700):
    factor = factor @ factor
    counter.add_(1)
    djinn.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def ran(program: str, *arguments: str, **environ: str) -> str:
    done = run_python(program, *arguments, has_djinn=True, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_values_come_back_after_the_process_that_kept_them_was_killed(start_server: Any, tmp_path: Path) -> None:
    server, saved = start_server("--sandbox", "auto"), str(tmp_path / "saved.pt")
    log = tmp_path / "first.log"
    with WarmPython(FIRST, [server.address, saved, "stays"], environment=clean_environment(), log=log, has_djinn=True
                    ) as first:
        assert first.stdout.readline() == "kept\n", log.read_text()
        djinn.init(server=server.address)
        with pytest.raises(RefusedError, match=r"open in another process, at tcp://127\.0\.0\.1"):
            djinn.init(server=server.address, name="lab")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert ran(SECOND, server.address, saved) == "equal True"
    # The second has said goodbye, and what it has dropped is gone.
    djinn.init(server=server.address, name="lab")
    assert sorted(djinn.kept) == ["model", "views", "whole"]
    assert djinn.kept["whole"][1, 0].item() == 0
    djinn.shutdown()


def test_an_unknown_name_is_a_new_session_and_says_what_became_of_the_old_one(start_server: Any) -> None:
    server = start_server("--named-lease-s", "1", "--control", "")
    djinn.init(server=server.address, name="short", name_lease_s=3600)
    djinn.kept["x"] = torch.ones(1000, device=DEVICE)
    time.sleep(1.5)
    assert djinn.kept["x"].sum().item() == 1000, "the lease begins when the client leaves"
    djinn.init(server=server.address, name="short")
    assert djinn.kept["x"].sum().item() == 1000
    djinn.shutdown()
    time.sleep(2.5)
    djinn.init(server=server.address, name="short")
    assert not djinn.kept
    with pytest.raises(KeyError, match="its lease was over, 1 s after its client had left"):
        djinn.kept["x"]
    djinn.shutdown()


def test_no_other_tenant_sees_or_opens_a_session(start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    mine, other = (tokens.create(name) for name in ("mine", "other"))
    server = start_server("--tokens", str(tokens.path), "--sandbox", "auto")
    djinn.init(server=server.address, token=mine, name="secret")
    djinn.kept["x"] = torch.full((3,), 7.0, device=DEVICE)
    listed = run_djinn("sessions", "--connect", server.address, "--json", DJINN_TOKEN=other)
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout) == []
    djinn.init(server=server.address, token=other, name="secret")
    assert not djinn.kept, "it is another session of the same name"
    with pytest.raises(KeyError, match=r"keeps no value 'x'\.\W$"):
        djinn.kept["x"]
    djinn.kept["x"] = torch.zeros(2, device=DEVICE)
    djinn.init(server=server.address, token=mine, name="secret")
    assert djinn.kept["x"].tolist() == [7, 7, 7]
    djinn.shutdown()


def test_sessions_are_listed_and_attached(start_server: Any, tmp_path: Path) -> None:
    server = start_server("--named-lease-s", "600")
    djinn.init(server=server.address, name="lab")
    djinn.kept["x"] = torch.arange(5, device=DEVICE)
    listed = json.loads(run_djinn("sessions", "--connect", server.address, "--json").stdout)
    assert [(row["name"], row["values"], row["left_s"]) for row in listed] == [("lab", 1, 600)]
    assert listed[0]["client"].startswith("tcp://127.0.0.1")
    djinn.shutdown()
    [row] = json.loads(run_djinn("sessions", "--connect", server.address, "--json").stdout)
    assert row["client"] == ""
    assert 0 < row["left_s"] <= 600
    assert row["size_bytes"] >= 40
    script = tmp_path / "script.py"
    script.write_text("import sys, djinn\nprint(djinn.kept['x'].sum().item(), sys.argv[1:])\n")
    attached = run_djinn("attach", "--connect", server.address, "lab", str(script), "--an-option")
    assert attached.stdout == "10 ['--an-option']\n", attached.stderr
    missing = run_djinn("attach", "--connect", server.address, "other", str(script))
    assert missing.returncode == 1
    assert "There is no session 'other'." in missing.stderr


AT_A_TERMINAL = """
import os, sys
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
sys.stdin, sys.stdout = open(0), open(1, "w")
from djinn_plugins.cli.app import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no pseudo-terminals")
def test_a_prompt_is_given_at_a_terminal(start_server: Any, tmp_path: Path) -> None:
    import pty

    server = start_server()
    djinn.init(server=server.address, name="lab")
    djinn.kept["x"] = torch.arange(5, device=DEVICE)
    djinn.shutdown()
    ours, theirs = pty.openpty()
    shown = ""

    def expect(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([ours], [], [], 60)[0], shown
            shown += os.read(ours, 4096).decode()
        shown = shown.partition(text)[2]

    with WarmPython(AT_A_TERMINAL, [os.ttyname(theirs), "attach", "--connect", server.address, "lab"],
                    environment=clean_environment(TERM="dumb"), log=tmp_path / "log", has_djinn=True) as attached:
        expect("Session lab: x in djinn.kept")
        expect(">>> ")
        for line, answer in ((b"kept['x'].sum().item() + 1\n", "11"), (b"1 / 0\n", "ZeroDivisionError"),
                             (b"kept['y'] = kept['x'] * 2\n", "* 2")):
            os.write(ours, line)
            expect(answer)
            expect(">>> ")
        os.write(ours, b"\x04")
        assert attached.wait(60) == 0
    os.close(theirs)
    os.close(ours)
    djinn.init(server=server.address, name="lab")
    assert djinn.kept["y"].tolist() == [0, 2, 4, 6, 8]
    djinn.shutdown()


def test_the_operator_ends_a_session_that_no_client_has_open(start_server: Any, tmp_path: Path) -> None:
    control = str(tmp_path / "control")
    server = start_server("--control", control)
    djinn.init(server=server.address, name="lab")
    djinn.kept["x"] = torch.ones(3, device=DEVICE)
    djinn.shutdown()
    [row] = json.loads(run_djinn("sessions", "--control", control, "--json").stdout)
    assert (row["name"], row["peer"], row["values"]) == ("lab", "", 1)
    kicked = run_djinn("kick", row["session"][:6], "--control", control)
    assert (kicked.returncode, kicked.stdout) == (0, f"{row['session'][:6]}: 1 session ended\n"), kicked.stderr
    assert json.loads(run_djinn("sessions", "--control", control, "--json").stdout) == []
    djinn.init(server=server.address, name="lab")
    with pytest.raises(KeyError, match="the server's operator has ended it"):
        djinn.kept["x"]
    djinn.shutdown()


def test_what_is_kept_counts_and_is_limited(start_server: Any) -> None:
    server = start_server("--max-handles", "40", "--named-sessions", "1", "--memory-mib", "16", "--max-host-mib", "64")
    djinn.init(server=server.address, name="lab")
    for number in range(6):  # 4 MiB each, more than the device may hold
        djinn.kept[f"piece {number}"] = torch.full((2**20,), float(number), device=DEVICE)
    with pytest.raises(TypeError, match="cannot be kept"):
        djinn.kept["more"] = object()
    with pytest.raises(djinn.errors.LimitError, match="the limit for all sessions is 40"):
        djinn.kept["more"] = [torch.ones(1, device=DEVICE) for _ in range(30)]
    djinn.init(server=server.address)
    several = [torch.ones(2, device=DEVICE) for _ in range(36)]
    with pytest.raises(djinn.errors.LimitError, match="42 values; the limit for all sessions is 40"):
        several[0].cpu()
    with pytest.raises(djinn.errors.LimitError, match="1 named sessions already"):
        djinn.init(server=server.address, name="another")
    djinn.init(server=server.address, name="lab")
    for number in range(6):
        assert djinn.kept[f"piece {number}"].sum().item() == number * 2**20
    djinn.shutdown()


def test_sessions_that_cannot_have_a_name_say_so(start_server: Any) -> None:
    server = start_server("--named-lease-s", "0")
    with pytest.raises(RefusedError, match="keeps no named sessions"):
        djinn.init(server=server.address, name="lab")
    with pytest.raises(ConfigurationError, match="program's own process"):
        djinn.init(server="local://", name="lab")
    djinn.init(server=server.address)
    with pytest.raises(ConfigurationError, match="has no name"):
        djinn.kept["x"] = torch.ones(1, device=DEVICE)
    djinn.shutdown()


def test_all_that_was_flushed_before_a_client_was_killed_is_applied(server: Any) -> None:
    """The server lags behind: it reads most of it when the client is dead, and nobody takes an acknowledgement."""
    assert run_python(FLUSHED, server.address, has_djinn=True).returncode == -signal.SIGKILL
    djinn.init(server=server.address, name="flushed")
    assert djinn.kept["counter"].item() == 700
    djinn.kept.clear()
    djinn.shutdown()
