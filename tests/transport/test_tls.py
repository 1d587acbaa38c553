"""Sessions over TLS: what is checked, what is refused on which side, and that it is the same wire."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import run_djinn
from support.servers.connection_options import connect_options
from support.surroundings.authority import Authority

import djinn
from djinn.errors import ConfigurationError, RefusedError, RemoteTimeoutError, TransportError
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Hello, Redirect, Upload, Welcome
from djinn.wire.tensors import header_of
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls
from djinn_plugins.transport.tcp.listener import listen_tls
from djinn_plugins.transport.tcp.outbox import MAX_QUEUED_BYTES


@pytest.fixture(autouse=True)
def the_server_is_unharmed(tls_server: Any, certificates: Any) -> Iterator[None]:
    yield
    assert tls_server.process.poll() is None
    connection = connect_tls(tls_server.address, connect_options(tls_ca=certificates.authority))
    connection.request(Batch(synchronize=True), ())
    connection.close()
    assert "Traceback" not in tls_server.log.read_text()


def wait_for(server: Any, text: str) -> None:
    """Wait until something is in a server's log."""
    until = time.monotonic() + 10
    while text not in server.log.read_text():
        assert time.monotonic() < until, server.log.read_text()
        time.sleep(0.05)


def test_a_session_over_tls(tls_server: Any, certificates: Any) -> None:
    assert tls_server.address.startswith("tls://127.0.0.1:")
    try:
        djinn.init(server=tls_server.address, tls_ca=certificates.authority)
        weight = torch.randn(300, 300)
        there = weight.to("remote_accelerator:0")
        assert torch.equal((there @ there.relu()).cpu(), weight @ weight.relu())
        assert djinn.get_runtime_state().address == tls_server.address
    finally:
        djinn.shutdown()


def test_large_and_many_tensors_arrive_as_they_were(tls_server: Any, certificates: Any) -> None:
    connection = connect_tls(tls_server.address, connect_options(tls_ca=certificates.authority))
    tensors = [torch.randn(n) for n in (0, 1, 100, 4095, 4096, 4097, 2**20 + 3, 2**23)]
    tensors += [torch.full((3,), float(n)) for n in range(500)]
    for _ in range(2):
        connection.submit(Batch([Upload(1 + n, header_of(tensor)) for n, tensor in enumerate(tensors)]), tensors)
        result, data = connection.request(Batch(fetch=tuple(range(1, 1 + len(tensors)))), ())
        assert not result.failures
        assert all(torch.equal(got, sent) for got, sent in zip(data, tensors, strict=True))
    connection.close()


def test_what_does_not_go_at_once_is_sent_in_the_background_while_answers_come(
    certificates: Any,
) -> None:
    """One thread sends and another receives on one TLS connection, which OpenSSL alone does not allow."""
    listener = listen_tls("tls://127.0.0.1:0", ListenOptions(tls_cert=certificates.server))
    received: list[Any] = []
    reads = threading.Event()

    def serve() -> None:
        channel = listener.accept()
        assert channel is not None
        greeting = channel.receive()
        assert greeting is not None
        assert isinstance(greeting[1], Hello)
        channel.send(greeting[0], Welcome(greeting[1].protocol, "", "", sys.byteorder, "cpu", "0" * 32))
        channel.greeted()
        reads.wait(60)
        while (message := channel.receive()) is not None:
            received.append(message[2][0])
        channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    connection = connect_tls(listener.address, connect_options(tls_ca=certificates.authority))
    tensor = torch.randn(2**18)
    sent = 0
    # The other side reads nothing so far: whatever waited for it would wait for a minute, and find nothing sent.
    while sent + tensor.nbytes < MAX_QUEUED_BYTES:
        connection.submit(Batch([Upload(1, header_of(tensor))]), [tensor])
        sent += tensor.nbytes
    assert not received, "it waited for the other side"
    assert connection._outbox.queued_bytes
    reads.set()
    assert connection._outbox._queued_bytes <= MAX_QUEUED_BYTES
    until = time.monotonic() + 30
    while connection._outbox.queued_bytes and time.monotonic() < until:
        time.sleep(0.01)
    connection.close()
    thread.join(10)
    listener.close()
    assert len(received) == sent // tensor.nbytes
    assert all(torch.equal(got, tensor) for got in received)


def test_another_authority_is_not_trusted(tls_server: Any, certificates: Any) -> None:
    with pytest.raises(TransportError, match="its certificate is not trusted") as caught:
        connect_tls(tls_server.address, connect_options(tls_ca=certificates.other_authority))
    assert tls_server.address in str(caught.value)
    assert "DJINN_TLS_CA" in caught.value.hint
    wait_for(tls_server, "does not trust this server's certificate")


def test_without_a_word_the_authorities_of_the_system_count(tls_server: Any) -> None:
    with pytest.raises(TransportError, match="its certificate is not trusted"):
        connect_tls(tls_server.address, ConnectOptions())


def test_the_name_is_checked(start_server: Any, certificates: Any) -> None:
    server = start_server("--tls-cert", certificates.elsewhere)
    with pytest.raises(TransportError, match="its certificate is not trusted") as caught:
        connect_tls(server.address, connect_options(tls_ca=certificates.authority))
    assert "127.0.0.1" in caught.value.summary
    assert "name" in caught.value.hint


def test_a_client_without_tls_is_told_so(tls_server: Any) -> None:
    with pytest.raises(RefusedError, match="speaks TLS only") as caught:
        connect(tls_server.address.replace("tls://", "tcp://"), ConnectOptions())
    assert "tls://" in caught.value.hint
    wait_for(tls_server, "speaks TLS only")


def test_a_client_with_tls_at_a_server_without_is_told_so(server: Any, certificates: Any) -> None:
    with pytest.raises(TransportError, match="TLS 1.3 could not be agreed on") as caught:
        connect_tls(server.address.replace("tcp://", "tls://"), connect_options(tls_ca=certificates.authority))
    assert "tcp://" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(2000),
                                  b"DJNN", bytes(range(256)) * 64])
def test_nonsense_is_closed(tls_server: Any, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tls_server.port), timeout=10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(2**16):
                pass


def test_earlier_versions_of_tls_are_refused(tls_server: Any, certificates: Any) -> None:
    context = ssl.create_default_context(cafile=certificates.authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", tls_server.port), timeout=10) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname="127.0.0.1")
    wait_for(tls_server, "TLS 1.3 could not be agreed on")


def test_a_client_that_says_nothing_is_closed_after_five_seconds(tls_server: Any) -> None:
    with socket.create_connection(("127.0.0.1", tls_server.port), timeout=20) as sock:
        began = time.monotonic()
        sock.sendall(b"\x16\x03\x01")
        assert sock.recv(1) == b""
        assert 4 < time.monotonic() - began < 8


def test_clients_have_to_show_a_certificate_if_the_server_says_so(start_server: Any, certificates: Any) -> None:
    server = start_server("--tls-cert", certificates.server, "--tls-client-ca", certificates.authority)
    for without in (connect_options(tls_ca=certificates.authority),
                    connect_options(tls_ca=certificates.authority, tls_cert=certificates.other_client)):
        with pytest.raises(TransportError, match="it wants a certificate of this client") as caught:
            connect_tls(server.address, without)
        assert "DJINN_TLS_CERT" in caught.value.hint
    wait_for(server, "it has shown no certificate")
    wait_for(server, "its certificate is not trusted")
    connection = connect_tls(server.address, connect_options(tls_ca=certificates.authority,
                                                            tls_cert=certificates.client))
    connection.request(Batch(synchronize=True), ())
    connection.close()


def test_a_certificate_that_was_revoked_opens_nothing(start_server: Any, tmp_path: Path) -> None:
    authority, file = Authority(tmp_path, "authority"), tmp_path / "trusted.pem"
    host, _ = authority.issue("host", "127.0.0.1")
    (revoked, number), (other, _) = authority.issue("revoked"), authority.issue("other")
    file.write_text(Path(authority.path).read_text())
    server = start_server("--tls-cert", host, "--tls-client-ca", str(file))

    def begin(certificate: str) -> SocketConnection:
        return connect_tls(server.address, connect_options(tls_ca=authority.path, tls_cert=certificate))

    running = begin(revoked)
    file.write_text(Path(authority.revoking(number)).read_text())
    os.kill(server.process.pid, signal.SIGHUP)
    wait_for(server, "reloaded")
    with pytest.raises(TransportError, match="certificate revoked"):
        begin(revoked)
    begin(other).close()
    running.request(Batch(synchronize=True), ())
    running.close()


def test_a_key_of_its_own_file_and_the_environment(start_server: Any, certificates: Any, tmp_path: Any) -> None:
    whole = Path(certificates.server).read_text()
    end = whole.index("-----BEGIN CERTIFICATE-----")
    (tmp_path / "key.pem").write_text(whole[:end])
    (tmp_path / "cert.pem").write_text(whole[end:])
    server = start_server("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    found = run_djinn("doctor", "--server", server.address, DJINN_TLS_CA=certificates.authority)
    assert f"{server.address} answers: device cpu" in " ".join(found.stdout.split()), found.stdout


def test_files_that_cannot_be_used_are_named(certificates: Any, tmp_path: Any) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    file = str(tmp_path / "no.pem")
    for options in (connect_options(tls_ca=file), connect_options(tls_cert=file)):
        with pytest.raises(ConfigurationError, match=r"no\.pem cannot be used"):
            connect_tls("tls://127.0.0.1:1", options)
    with pytest.raises(ConfigurationError, match="no tls_cert"):
        connect_tls("tls://127.0.0.1:1", connect_options(tls_key="key.pem"))
    with pytest.raises(ConfigurationError, match="needs a certificate"):
        listen_tls("tls://127.0.0.1:0", ListenOptions())


def greeted_by(certificates: Any, answer: Any) -> str:
    """Listen once, answer one greeting in some way, and return the address."""
    listener = listen_tls("tls://127.0.0.1:0", ListenOptions(tls_cert=certificates.server))

    def serve() -> None:
        channel = listener.accept()
        assert channel is not None
        received = channel.receive()
        assert received is not None
        channel.send(received[0], answer(listener.address))
        channel.receive()
        channel.close()
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener.address


@pytest.mark.parametrize("target", ["tcp://127.0.0.1:1", "unix:///tmp/x", "nowhere", ":", ":99999", ":0", "tls://h"])
def test_nobody_is_led_away_from_encryption_or_into_the_void(certificates: Any, target: str) -> None:
    address = greeted_by(certificates, lambda _: Redirect(target, "00"))
    with pytest.raises(TransportError, match="where nobody should go"):
        connect_tls(address, connect_options(tls_ca=certificates.authority))


def test_a_server_that_stops_to_answer_in_the_handshake_is_given_up(certificates: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(RemoteTimeoutError):
        connect_tls(f"tls://127.0.0.1:{mute.getsockname()[1]}",
                    connect_options(tls_ca=certificates.authority, connect_timeout_s=0.5))


def test_a_ticket_is_good_once_and_nothing_else_is(tls_server: Any, certificates: Any) -> None:
    redirect = redirect_of(tls_server.address, certificates)
    assert len(redirect.certificate) > 100
    worker = f"tls://127.0.0.1{redirect.address}"
    first = greet(worker, certificates, redirect.ticket, redirect.certificate)
    first.request(Batch(synchronize=True), ())
    altered = redirect_of(tls_server.address, certificates).ticket
    flipped = ("0" if altered[0] != "0" else "1") + altered[1:]
    for ticket in (redirect.ticket, "", "00", "zz", flipped, altered[:-2], altered + "00"):
        with pytest.raises(RefusedError, match="ticket is not valid"):
            greet(worker, certificates, ticket, redirect.certificate)
    greet(worker, certificates, altered, redirect.certificate).close()
    first.request(Batch(synchronize=True), ())
    first.close()


def redirect_of(address: str, certificates: Any) -> Redirect:
    connection = unconnected(address, certificates)
    redirect = connection.greet("", time.monotonic() + 20)
    assert redirect is not None
    connection.close()
    return redirect


def greet(address: str, certificates: Any, ticket: str, pin: str) -> SocketConnection:
    connection = unconnected(address, certificates, pin)
    assert connection.greet("", time.monotonic() + 20, ticket=ticket) is None
    return connection


def unconnected(address: str, certificates: Any, pin: str = "") -> SocketConnection:
    from djinn_plugins.transport.tcp.opening import open_tls
    from djinn_plugins.transport.tcp.tls import client_context

    options = connect_options(tls_ca=certificates.authority, tls_pin=pin)
    return SocketConnection(address, open_tls(address, client_context(options), options))
