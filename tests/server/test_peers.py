"""Which servers a server may connect to."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from djinn.errors import ConfigurationError, PeerError
from djinn_plugins.server.peers import PeerPolicy

PRIVATE = PeerPolicy.parse("", is_private=True)
OPEN = PeerPolicy.parse("", is_private=False)
NAMED = PeerPolicy.parse("gpu-2, GPU-3.local,10.1.0.0/16,[2001:db8::]/32,192.0.2.7", is_private=False)


@pytest.mark.parametrize(("rules", "address", "wanted"), [
    (PRIVATE, "tcp://127.0.0.1:7777", "tcp://127.0.0.1:7777"),
    (PRIVATE, "tcp://127.9.9.9:1/", "tcp://127.9.9.9:1"),
    (PRIVATE, "tcp://[::1]:7777", "tcp://[::1]:7777"),
    (NAMED, "tcp://gpu-2:7777", "tcp://gpu-2:7777"),
    (NAMED, "tcp://gpu-3.LOCAL:7777", "tcp://gpu-3.LOCAL:7777"),
    (NAMED, "tcp://10.1.255.3:7777", "tcp://10.1.255.3:7777"),
    (NAMED, "tcp://[2001:db8::5]:7777", "tcp://[2001:db8::5]:7777"),
    (NAMED, "tcp://[::ffff:10.1.0.9]:7777", "tcp://[::ffff:10.1.0.9]:7777"),
    (NAMED, "tcp://192.0.2.7:1", "tcp://192.0.2.7:1"),
    (PeerPolicy.parse("unix", is_private=False), "unix:///run/a.sock", "unix:///run/a.sock"),
    (PeerPolicy.parse("", is_private=True, listens_on_path=True), "unix:///run/a.sock", "unix:///run/a.sock"),
])
def test_what_is_permitted(rules: PeerPolicy, address: str, wanted: str) -> None:
    assert rules.permit(address) == wanted


@pytest.mark.parametrize(("rules", "address"), [
    (OPEN, "tcp://127.0.0.1:7777"),
    (OPEN, "tcp://localhost:7777"),
    (OPEN, "tcp://[::1]:7777"),
    (PRIVATE, "tcp://10.1.0.1:7777"),
    (PRIVATE, "tcp://0.0.0.0:7777"),
    (PRIVATE, "tcp://169.254.169.254:80"),
    (PRIVATE, "unix:///var/run/docker.sock"),
    (NAMED, "tcp://10.2.0.1:7777"),
    (NAMED, "tcp://127.0.0.1:7777"),
    (NAMED, "tcp://192.0.2.70:1"),
    (NAMED, "unix:///run/a.sock"),
    (PRIVATE, "tcp://"),
    (PRIVATE, "somewhere"),
    (PRIVATE, "tcp://:80"),
    (PeerPolicy.parse("unix", is_private=False), "tcp://unix.invalid:80"),
])
def test_what_is_not(rules: PeerPolicy, address: str) -> None:
    with pytest.raises(PeerError) as caught:
        rules.permit(address)
    assert address in caught.value.summary
    assert caught.value.hint


def answering(*numbers: str) -> Any:
    def getaddrinfo(host: str, port: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (number, 0)) for number in numbers]

    return getaddrinfo


def test_a_name_is_permitted_for_all_that_it_means_and_connected_to_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answering("127.0.0.1", "127.0.0.2"))
    assert PRIVATE.permit("tcp://here.example:80") == "tcp://127.0.0.1:80"
    monkeypatch.setattr(socket, "getaddrinfo", answering("127.0.0.1", "10.0.0.1"))
    with pytest.raises(PeerError, match="may not connect"):
        PRIVATE.permit("tcp://here.example:80")


@pytest.mark.parametrize("text", ["10.0.0.0/99", "gpu-2:7777", "a b", "tcp://x", "10.0.0.1:80"])
def test_entries_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--peers"):
        PeerPolicy.parse(text, is_private=True)
