"""When tokens end: how it is written, and what becomes of tokens that are replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from djinn.errors import ConfigurationError, TokenEndedError
from djinn_plugins.cli.app import main
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenants import granted, written
from djinn_plugins.server.tokens.authenticators import TokenFileTenants
from djinn_plugins.server.tokens.expiry import duration_s, end_of
from djinn_plugins.server.tokens.tokens import TokenFile

NOW_S = 1_800_000_000


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


@pytest.mark.parametrize(("text", "seconds"), [
    ("90s", 90), ("30m", 1800), ("12h", 43200), ("30d", 2_592_000), ("2w", 1_209_600), (" 1d ", 86400)])
def test_lengths_of_time(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds
    assert end_of(text, NOW_S) == NOW_S + seconds


@pytest.mark.parametrize(("text", "moment"), [
    ("", 0), ("2027-01-31", 1801353600), ("2027-01-31T12:00", 1801396800), ("2027-01-31T12:00:00+02:00", 1801389600)])
def test_moments_are_utc_unless_they_say_otherwise(text: str, moment: int) -> None:
    assert end_of(text, NOW_S) == moment


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1.5h", "tomorrow", "2027-13-01", "2020-01-01", "0s", "9" * 9 + "w",
                                  "9" * 20 + "s", "\u0663d"])
def test_what_is_no_end_or_has_passed_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        end_of(text, NOW_S)


def test_written_as_it_is_read() -> None:
    assert written(NOW_S) == "2027-01-15T08:00:00Z"
    assert end_of(written(NOW_S + 1), NOW_S) == NOW_S + 1


def test_a_tenant_stays_the_same_with_another_token_and_old_ones_end_after_the_overlap(file: TokenFile) -> None:
    first = file.create("alice", weight=3, limits=Limits(handles=5), expires=int(time.time()) + 1000)
    before = file.read().tenants["alice"]
    second = file.rotate("alice", 100)
    third = file.rotate("alice", 5000)
    entry = file.read().tenants["alice"]
    assert (entry.key, entry.weight, entry.limits) == (before.key, 3, Limits(handles=5))
    found = [file.read().find(token) for token in (third, second, first)]
    assert [secret for _, secret in filter(None, found)] == list(entry.secrets)
    now_s = time.time()
    lasts_s = [secret.expires - now_s for secret in entry.secrets]
    assert 900 < lasts_s[0] <= 1000, "as long as the one before"
    assert 900 < lasts_s[1] <= 1000, "the overlap makes none last longer"
    assert 0 < lasts_s[2] <= 100
    fourth = file.rotate("alice", 0, 0)
    entry = file.read().tenants["alice"]
    assert len(entry.secrets) == 1
    assert entry.expires == 0
    assert entry.key == before.key
    assert file.read().find(first) is file.read().find(third) is None
    file.revoke("alice")
    assert file.read().find(fourth) is None
    with pytest.raises(ConfigurationError, match="no token for 'alice'"):
        file.rotate("alice", 0)


def test_who_is_let_in_and_why_not(file: TokenFile) -> None:
    token = file.create("alice")
    tenants = TokenFileTenants(file, Limits(nodes=7))
    admitted = tenants.authenticate(token)
    assert tenants.current(admitted.tenant) == admitted.tenant
    assert tenants.why_ended(admitted.tenant, admitted.token) is None
    another = file.rotate("alice", 1)
    assert tenants.authenticate(another).tenant == admitted.tenant
    assert tenants.authenticate(another).token != admitted.token
    time.sleep(max(0.0, file.read().tenants["alice"].others[0].expires - time.time()))
    with pytest.raises(TokenEndedError, match="expired"):
        tenants.authenticate(token)
    assert "expired" in str(tenants.why_ended(admitted.tenant, admitted.token))
    assert tenants.current(admitted.tenant) == admitted.tenant
    file.revoke("alice")
    file.create("alice")
    assert tenants.current(admitted.tenant) is None
    assert "revoked" in str(tenants.why_ended(admitted.tenant, b""))


def test_a_tenants_own_limits_win_but_for_memory_of_which_nobody_has_more_than_all() -> None:
    server = Limits(nodes=7, handles=9, memory_bytes=100)
    assert granted(Limits(nodes=3, memory_bytes=200), server) == Limits(nodes=3, handles=9, memory_bytes=100)
    assert granted(Limits(memory_bytes=50), server) == Limits(nodes=7, handles=9, memory_bytes=50)
    assert granted(Limits(memory_bytes=50), Limits()) == Limits(memory_bytes=50)


def test_the_commands(file: TokenFile, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["token", *arguments, "--tokens", str(file.path)])
        return left.value.code or 0, *capsys.readouterr()

    assert run("create", "alice", "--expires", "yesterday")[0] == 2
    assert run("create", "alice", "--expires", "2d")[0] == 0
    status, token, said = run("rotate", "alice", "--overlap", "1h")
    assert status == 0
    assert (file.read().find(token.strip()) or ("",))[0] == "alice"
    assert token.strip() not in said
    rows = [row.split("\t") for row in run("list")[1].splitlines()]
    assert [row[0] for row in rows] == ["alice", "alice"]
    assert [row[2] for row in rows] == [written(secret.expires) for secret in file.read().tenants["alice"].secrets]
    assert run("rotate", "alice", "--overlap", "soon")[0] == 2
    assert run("rotate", "bob")[0] == 2
    assert run("rotate", "alice", "--overlap", "0s", "--expires", "never")[0] == 0
    assert [row.split("\t")[2] for row in run("list")[1].splitlines()] == ["-"]
