"""The file of tokens: what is in it, who can read it, and what becomes of it when several write."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes.warm import run_djinn

from djinn.errors import ConfigurationError, TokenEndedError
from djinn.wire.messages import Goodbye
from djinn_plugins.cli.app import main
from djinn_plugins.server.grants import Grants
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tickets import VALID_S
from djinn_plugins.server.tokens.tokens import TokenFile, default_path


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "state" / "tokens.json")


def test_what_is_kept_lets_nobody_in(file: TokenFile) -> None:
    token = file.create("alice", weight=2, limits=Limits(handles=5), models=["meta/*"], share="lab")
    assert len(token) >= 43
    text = file.path.read_text()
    entry = json.loads(text)["tenants"]["alice"]
    assert token not in text
    assert set(entry) <= {"salt", "digest", "created", "weight", "limits", "models", "share"}
    tokens = file.read()
    assert tokens.find(token) == ("alice", tokens.tenants["alice"].secrets[0])
    assert (tokens.tenants["alice"].limits, tokens.tenants["alice"].models, tokens.tenants["alice"].share) == (
        Limits(handles=5), ("meta/*",), "lab")
    for wrong in ("", token[:-1], token + "x", entry["digest"], entry["salt"], "\udcff", "é"):
        assert tokens.find(wrong) is None


def test_two_tokens_are_different_and_so_are_their_salts(file: TokenFile) -> None:
    first, second = file.create("a"), file.create("b")
    tokens = file.read()
    assert first != second
    assert tokens.tenants["a"].salt != tokens.tenants["b"].salt
    assert [(tokens.find(token) or ("",))[0] for token in (first, second)] == ["a", "b"]
    file.revoke("a")
    assert [(file.read().find(token) or ("",))[0] for token in (first, second)] == ["", "b"]


def test_only_its_owner_can_read_it_and_a_file_that_others_could_write_is_refused(file: TokenFile) -> None:
    before = os.umask(0)
    try:
        file.create("alice")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    for mode in (0o640, 0o602, 0o660):
        file.path.chmod(mode)
        with pytest.raises(ConfigurationError, match="chmod 600"):
            file.read()


def test_a_file_of_another_user_is_refused(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.create("alice")
    user = file.path.stat().st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if user == 1:
        file.read()  # the administrator's
        monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0o600, 0, 0, 0, 7, 0, 0, 0, 0, 0)))
    with pytest.raises(ConfigurationError, match=f"chown {user}"):
        file.read()


def test_a_file_that_was_written_in_place_with_its_times_has_another_state(file: TokenFile) -> None:
    file.create("alice")
    before, status = file.state(), file.path.stat()
    file.path.write_bytes(file.path.read_bytes().replace(b"alice", b"Alice"))
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.state() != before


@pytest.mark.parametrize("text", [
    "", "{", "[]", '{"version": 2, "tenants": {}}', '{"tenants": {"a": {}}}', '{"tenants": {"": 1}}', "\xff",
    '{"tenants": {"a": {"salt": "zz", "digest": "", "created": 0}}}',
    '{"tenants": {"a": {"salt": "", "digest": "", "created": 0}}}',
    '{"tenants": {"a\\n": {"salt": "' + "00" * 16 + '", "digest": "' + "00" * 32 + '", "created": 0}}}',
    '{"tenants": {"a": {"salt": "' + "00" * 16 + '", "digest": "' + "00" * 32 + '", "created": 0, "x": 1}}}',
    '{"tenants": {"a": {"salt": "' + "00" * 16 + '", "digest": "' + "00" * 32 + '", "created": 0, "weight": -1}}}',
])
def test_a_file_of_something_else_is_refused(file: TokenFile, text: str) -> None:
    file.path.parent.mkdir()
    file.path.write_text(text, encoding="latin-1")
    file.path.chmod(0o600)
    with pytest.raises(ConfigurationError):
        file.read()


def test_names_that_make_no_sense_and_names_that_are_taken(file: TokenFile) -> None:
    for name in ("", "a b", "../a", "-a", "a\n", "é", "a" * 65):
        with pytest.raises(ConfigurationError, match="no name of a tenant"):
            file.create(name)
    assert not file.path.exists()
    file.create("a")
    with pytest.raises(ConfigurationError, match="djinn token revoke a"):
        file.create("a")
    with pytest.raises(ConfigurationError, match="no token for 'b'"):
        file.revoke("b")


def test_writers_at_the_same_time_lose_nothing(file: TokenFile) -> None:
    code = """
import sys
from pathlib import Path
from djinn_plugins.postponing import postpone
postpone("djinn")
from djinn_plugins.server.tokens.tokens import TokenFile
for number in range(20):
    TokenFile(Path(sys.argv[1])).create(f"{sys.argv[2]}-{number}")
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file.path), str(who)]) for who in range(3)]
    assert [writer.wait(100) for writer in writers] == [0, 0, 0]
    assert len(file.read().tenants) == 60
    assert sorted(path.name for path in file.path.parent.iterdir()) == [".tokens.json.lock", "tokens.json"]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_path() == Path("/state/djinn/tokens.json")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_path() == Path.home() / ".local" / "state" / "djinn" / "tokens.json"


def in_a_process(*arguments: str) -> tuple[int, str, str]:
    done = run_djinn("token", *arguments)
    return done.returncode, done.stdout, done.stderr


def test_the_commands(file: TokenFile, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["token", *arguments])
        return left.value.code or 0, *capsys.readouterr()

    where = ("--tokens", str(file.path))
    status, made, said = in_a_process(
        "create", "alice", *where, "--weight", "2.5", "--max-sessions", "3", "--max-inflight-mib", "1")
    assert status == 0, said
    token = made.strip()
    assert (file.read().find(token) or ("",))[0] == "alice"
    assert token not in said
    status, made, said = run("create", "alice", *where)
    assert (status, made) == (2, "")
    assert "djinn: " in said
    _, listed, _ = run("list", *where)
    (row,) = listed.splitlines()
    assert row.split("\t")[0] == "alice"
    assert row.split("\t")[2:] == ["-", "2.5", "3", "1048576", *["-"] * 10]
    assert token not in listed
    assert run("revoke", "alice", *where)[0] == 0
    assert run("revoke", "alice", *where)[0] == 2
    assert run("list", *where)[1] == ""


def test_a_worker_refuses_an_ended_token_only_as_long_as_tickets_last() -> None:
    """Then the gateway alone decides: the clock may have been wrong, or the operator may have restored the token."""
    now = [0.0]
    grants = Grants(lambda: now[0])
    channel: Any = type("Connection", (), {})()
    for number in range(1000):
        grants.end(b"%d" % number, Goodbye("DJ318", "It has ended."))
        with pytest.raises(TokenEndedError):
            grants.admit(channel, b"%d" % number)
        now[0] += VALID_S / 10
    grants.admit(channel, b"0")
    assert len(grants._ended) <= 11
