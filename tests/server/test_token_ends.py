"""Tokens that expire, are replaced and are revoked, while their sessions run and the machine has much else to do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clients.tenants import products
from support.servers.connection_options import connect_options

import djinn
from djinn.errors import RefusedError, TokenEndedError, TransportError
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls

ONES = torch.ones(4)
SYNCHRONIZE = Batch(synchronize=True)
ENDS_S = 5.0
"""What docs/server.md promises."""
LARGE = torch.eye(1024)
MANY = 4000
"""Products of such matrices take more than a minute."""


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


def session(server: Any, token: str) -> SocketConnection:
    return connect(server.address, ConnectOptions(token=token, connect_timeout_s=60))


def works(connection: SocketConnection) -> bool:
    result, data = connection.request(Batch([Upload(1, header_of(ONES))], fetch=(1,)), [ONES])
    return not result.failures and torch.equal(data[0], ONES)


def end_of(connection: SocketConnection, patience_s: float = 60) -> TransportError:
    """Use a session until it ends, and return what its client hears."""
    until = time.monotonic() + patience_s
    try:
        while time.monotonic() < until:
            connection.request(SYNCHRONIZE, ())
            time.sleep(0.02)
    except TransportError as error:
        return error
    raise AssertionError("it has not ended")


def expire(file: TokenFile, name: str, *, which: int) -> int:
    """Have one of a tenant's tokens, the newest first, expire two seconds from now; return when."""
    content = json.loads(file.path.read_text())
    entry = content["tenants"][name]
    expires = int(time.time()) + 2
    (entry if which == 0 else entry["others"][which - 1])["expires"] = expires
    written = file.path.with_name("written")
    written.touch(0o600)
    written.write_text(json.dumps(content))
    written.replace(file.path)
    return expires


def test_an_expired_token_ends_its_sessions_and_says_so(start_server: Any, tokens: TokenFile) -> None:
    alice, bob = tokens.create("alice"), tokens.create("bob")
    server = start_server("--tokens", str(tokens.path))
    of_alice, of_bob = session(server, alice), session(server, bob)
    assert all(map(works, (of_alice, of_bob)))
    expires = expire(tokens, "alice", which=0)
    assert isinstance(end_of(of_alice), TokenEndedError)
    assert time.time() >= expires
    with pytest.raises(TokenEndedError, match=r"The token expired at \d{4}-\d\d-\d\dT") as caught:
        session(server, alice)
    assert caught.value.code == "DJ318"
    assert works(of_bob)
    anew = session(server, tokens.rotate("alice", 0))
    assert works(anew)
    assert "alice: The token expired" in server.log.read_text()
    for connection in (of_bob, anew):
        connection.close()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_token_is_replaced_with_an_overlap(
    start_server: Any, tokens: TokenFile, certificates: Any, scheme: str,
) -> None:
    """Both are the same tenant's. When the overlap is over, the sessions of the first end, and only these."""
    first = tokens.create("alice")
    encrypted = ("--tls-cert", certificates.server) if scheme == "tls" else ()
    server = start_server("--tokens", str(tokens.path), "--isolate", "tenant", *encrypted)

    def begin(token: str) -> SocketConnection:
        options = connect_options(token=token, connect_timeout_s=60, tls_ca=certificates.authority)
        return (connect_tls if scheme == "tls" else connect)(server.address, options)

    old = begin(first)
    workers = server.workers
    second = tokens.rotate("alice", 3600)
    also_old, new = begin(first), begin(second)
    assert all(map(works, (old, also_old, new)))
    expire(tokens, "alice", which=1)
    for connection in (old, also_old):
        assert isinstance(end_of(connection), TokenEndedError)
    with pytest.raises(TokenEndedError, match="expired"):
        begin(first)
    assert works(new)
    assert server.workers == workers
    third = tokens.rotate("alice", 0)
    assert isinstance(end_of(new), TokenEndedError)
    with pytest.raises(RefusedError, match="The token is wrong"):
        begin(second)
    last = begin(third)
    assert works(last)
    assert server.workers == workers
    last.close()


@contextmanager
def company(processes: int) -> Iterator[None]:
    """Have so many processes do nothing but compute."""
    with ExitStack() as stack:
        for _ in range(processes):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        yield


def test_a_revoked_token_ends_its_sessions_in_time_though_the_machine_is_busy(
    start_server: Any, tokens: TokenFile,
) -> None:
    """One session waits for a program that runs for minutes, another asks all the time; and the name can be used again
    at once."""
    bob = tokens.create("bob")
    server = start_server("--tokens", str(tokens.path))
    of_bob = session(server, bob)
    took_s: list[float] = []
    with company(2):
        token = tokens.create("alice")
        for _ in range(3):
            ended: list[tuple[TransportError, float]] = []
            computes, asks = session(server, token), session(server, token)
            computes.request(Batch([Upload(1, header_of(LARGE)), Define(1, products(MANY))], synchronize=True), [LARGE])
            computes.submit(Batch([Run(1, (1,), [], (2,))]), ())
            threads = [threading.Thread(target=lambda one=one, ended=ended: ended.append(
                (end_of(one), time.monotonic()))) for one in (computes, asks)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            assert not ended
            tokens.revoke("alice")
            began = time.monotonic()
            token = tokens.create("alice")
            anew = session(server, token)
            for thread in threads:
                thread.join(60)
            took_s.append(max(at for _, at in ended) - began)
            assert len(ended) == 2
            assert any(isinstance(error, TokenEndedError) for error, _ in ended), ended
            assert works(anew)
            anew.close()
    assert works(of_bob)
    of_bob.close()
    assert min(took_s) < ENDS_S, took_s


def test_a_program_that_recovers_does_not_go_on_asking_when_its_token_has_ended(
    start_server: Any, tokens: TokenFile,
) -> None:
    token = tokens.create("alice")
    server = start_server("--tokens", str(tokens.path))
    djinn.init(server=server.address, token=token, recovery="replay", recovery_timeout_s=300, connect_timeout_s=60)
    try:
        value = torch.ones(3, device="remote_accelerator:0")
        assert value.sum().item() == 3
        tokens.revoke("alice")
        began = time.monotonic()
        numbers = count(1)

        def go_on() -> None:
            while time.monotonic() - began < 100:
                (value + next(numbers)).sum().item()  # always another number: none is answered from memory

        for _ in range(2):
            with pytest.raises(TokenEndedError, match="revoked"):
                go_on()
    finally:
        djinn.shutdown()
