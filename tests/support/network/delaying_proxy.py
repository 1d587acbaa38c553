"""A distance between two processes: a TCP proxy that delays each direction and lets as much through as before.

``python delaying_proxy.py HOST:PORT DELAY_S`` prints the address that it listens on, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time

CHUNK_BYTES = 1 << 20
MAX_CHUNKS = 512
"""What may be under way in one direction; then the sender waits, as for a full window."""


def carry(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Carry one direction until its sender ends it."""
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(MAX_CHUNKS)

    def deliver() -> None:
        try:
            while True:
                due, chunk = under_way.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not chunk:
                    break
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            # The receiver is gone, which its sender learns, unless it is gone as well.
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=deliver, daemon=True).start()
    chunk = b"-"
    while chunk:
        try:
            chunk = source.recv(CHUNK_BYTES)
        except OSError:
            # Reset by its sender: for the receiver, the end.
            chunk = b""
        under_way.put((time.monotonic() + delay_s, chunk))


def serve(listener: socket.socket, server: tuple[str, int], delay_s: float) -> None:
    """Connect every client to the server."""
    while True:
        client, _ = listener.accept()
        upstream = socket.create_connection(server)
        for source, target in ((client, upstream), (upstream, client)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=carry, args=(source, target, delay_s), daemon=True).start()


def main() -> None:
    """Serve until standard input ends."""
    host, _, port = sys.argv[1].rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, (host, int(port)), float(sys.argv[2])), daemon=True).start()
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
