"""What encryption costs: the same requests over TLS and without, to servers of their own, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from support.servers.connection_options import connect_options

from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls

LENGTH = 64 * 2**20


@pytest.fixture
def secured(tmp_path: Path, start_server: Callable[..., Any]) -> Iterator[SocketConnection]:
    """A session over TLS 1.3."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    address = start_server("--tls-cert", str(tmp_path / "server.pem")).address
    with closing(connect_tls(address, connect_options(tls_ca=str(tmp_path / "authority.pem")))) as connection:
        yield connection


@pytest.fixture
def plain(server_address: str) -> Iterator[SocketConnection]:
    """A session over TCP."""
    with closing(connect(server_address, ConnectOptions())) as connection:
        yield connection


def requests(connection: SocketConnection, batch: Batch, *tensors: torch.Tensor) -> Callable[[], None]:
    def request() -> None:
        assert not connection.request(batch, tensors)[0].failures

    return request


def ask(connection: SocketConnection) -> Callable[[], None]:
    return requests(connection, Batch(synchronize=True))


def upload(connection: SocketConnection) -> Callable[[], None]:
    """Replace the same value, so that the server's memory does not grow."""
    tensor = torch.ones(LENGTH // 4)
    return requests(connection, Batch([Upload(1, header_of(tensor))], synchronize=True), tensor)


def download(connection: SocketConnection) -> Callable[[], None]:
    upload(connection)()
    return requests(connection, Batch(fetch=(1,)))


def test_empty_request_tls(
    plain: SocketConnection, secured: SocketConnection, compare: Callable[..., Any], publish: Callable[..., None]
) -> None:
    comparison = compare(ask(plain), ask(secured), turns=5000, warmup_turns=500)
    publish(comparison.cost, comparison.details)


def test_upload_tls(
    plain: SocketConnection, secured: SocketConnection, compare: Callable[..., Any], publish: Callable[..., None]
) -> None:
    comparison = compare(upload(plain), upload(secured), turns=15, warmup_turns=3)
    publish(comparison.speed, comparison.details)


def test_download_tls(
    plain: SocketConnection, secured: SocketConnection, compare: Callable[..., Any], publish: Callable[..., None]
) -> None:
    comparison = compare(download(plain), download(secured), turns=15, warmup_turns=3)
    publish(comparison.speed, comparison.details)
