"""Clients that connect while their worker dies, before the gateway has noticed that."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from support.servers.connection_options import connect_options

from djinn.errors import TransportError
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")
CLIENTS = 3


def stored(connection: SocketConnection) -> bool:
    """Whether a session keeps a value."""
    result, data = connection.request(Batch([Upload(1, header_of(torch.ones(4)))], fetch=(1,)), [torch.ones(4)])
    return not result.failures and torch.equal(data[0], torch.ones(4))


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_they_get_the_next_worker(scheme: str, start_server: Any, certificates: Any) -> None:
    if scheme == "tls":
        server = start_server("--tls-cert", certificates.server)
        options, connecting = connect_options(tls_ca=certificates.authority, connect_timeout_s=60), connect_tls
    else:
        server = start_server()
        options, connecting = ConnectOptions(connect_timeout_s=60), connect
    (dying,) = server.workers
    # It takes connections in, and answers none.
    os.kill(dying, signal.SIGSTOP)
    opened: list[SocketConnection] = []
    failed: list[Exception] = []

    def open_session() -> None:
        try:
            opened.append(connecting(server.address, options))
        except TransportError as error:
            failed.append(error)

    threads = [threading.Thread(target=open_session) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert not opened
    assert not failed
    os.kill(dying, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert len(opened) == CLIENTS
    assert all(map(stored, opened))
    assert dying not in server.workers
    for connection in opened:
        connection.close()
