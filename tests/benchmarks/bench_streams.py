"""Why tensors travel over blocking sockets: the same echoes and transfers over anyio's streams.

Both sides of each pair are of one kind, in two processes on this machine. Bytes end up in the memory of a tensor.
``python tests/benchmarks/bench_streams.py`` prints a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import anyio
import torch
from anyio.abc import SocketAttribute, SocketStream

ECHO_BYTES, ECHOES = 128, 2000
TRANSFER_BYTES = 256 * 2**20
PIECE_BYTES = 2**20
ROUNDS = 7


def memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())


def fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view):]


async def fill_from(stream: SocketStream, view: memoryview) -> None:
    while view:
        data = await stream.receive(len(view))
        view[:len(data)] = data
        view = view[len(data):]


def serve_blocking() -> None:
    """Echo, then receive a transfer and answer it by a byte, again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    small, large = bytearray(ECHO_BYTES), memory_of(torch.empty(TRANSFER_BYTES, dtype=torch.uint8))
    with sock:
        while True:
            for _ in range(ECHOES):
                fill(sock, memoryview(small))
                sock.sendall(small)
            fill(sock, large)
            sock.sendall(b".")


async def serve_streams() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        print(listener.extra(SocketAttribute.local_port), flush=True)
        await listener.serve(answer)


async def answer(stream: SocketStream) -> None:
    small, large = bytearray(ECHO_BYTES), memory_of(torch.empty(TRANSFER_BYTES, dtype=torch.uint8))
    with contextlib.suppress(anyio.EndOfStream):  # the other side has measured enough
        while True:
            for _ in range(ECHOES):
                await fill_from(stream, memoryview(small))
                await stream.send(small)
            await fill_from(stream, large)
            await stream.send(b".")


def measured(rounds: Callable[[], tuple[float, float]]) -> dict[str, float]:
    """Return the best time of an echo, and of a transfer: others share the machine."""
    echoes, transfers = zip(*[rounds() for _ in range(ROUNDS)][1:], strict=True)
    return {"echo_us": min(echoes) / ECHOES * 1e6,
            "transfer_gb_s": TRANSFER_BYTES / min(transfers) / 1e9}


def measure_blocking(port: int) -> dict[str, float]:
    data = memory_of(torch.ones(TRANSFER_BYTES, dtype=torch.uint8))
    small = bytearray(ECHO_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def round_() -> tuple[float, float]:
            began = time.perf_counter()
            for _ in range(ECHOES):
                sock.sendall(small)
                fill(sock, memoryview(small))
            between = time.perf_counter()
            sock.sendall(data)
            fill(sock, memoryview(bytearray(1)))
            return between - began, time.perf_counter() - between

        return measured(round_)


async def measure_streams(port: int) -> dict[str, float]:
    data = memory_of(torch.ones(TRANSFER_BYTES, dtype=torch.uint8))
    small = bytearray(ECHO_BYTES)
    times: list[tuple[float, float]] = []
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(ECHOES):
                await stream.send(small)
                await fill_from(stream, memoryview(small))
            between = time.perf_counter()
            # All at once, asyncio would copy what is left again and again.
            for first in range(0, TRANSFER_BYTES, PIECE_BYTES):
                await stream.send(data[first:first + PIECE_BYTES])
            await fill_from(stream, memoryview(bytearray(1)))
            times.append((between - began, time.perf_counter() - between))
    remaining = iter(times)
    return measured(lambda: next(remaining))


def main() -> None:
    found = {}
    for kind in ("blocking", "streams"):
        with subprocess.Popen([sys.executable, __file__, kind], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            found[kind] = (measure_blocking(port) if kind == "blocking" else anyio.run(measure_streams, port))
            server.kill()
    found["streams_over_blocking"] = {name: found["streams"][name] / found["blocking"][name]
                                      for name in ("echo_us", "transfer_gb_s")}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:] == ["blocking"]:
        serve_blocking()
    elif sys.argv[1:] == ["streams"]:
        anyio.run(serve_streams)
    else:
        main()
