"""The other end of a raw socket loop, in a process of its own: takes bytes, gives bytes, gives back what it was sent.

``python -m support.network.raw_peer NAME BYTES`` listens on a free port of the loopback interface, or on the path that
NAME is if that begins with a slash, prints the port or the path, and serves one connection.
"""

from __future__ import annotations

import socket
import sys

QUESTION_BYTES = 64


def connected(address: tuple[str, int] | str) -> socket.socket:
    """Connect to a peer, as a careful programmer would."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.connect(address)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)


def take(sock: socket.socket, memory: memoryview) -> None:
    """Fill memory that exists and has been touched."""
    filled = 0
    while filled < len(memory):
        filled += sock.recv_into(memory[filled:])


def main(name: str, length: int) -> None:
    listening = socket.socket(socket.AF_UNIX if name.startswith("/") else socket.AF_INET)
    listening.bind(name if name.startswith("/") else ("127.0.0.1", 0))
    listening.listen()
    print(name if name.startswith("/") else listening.getsockname()[1], flush=True)
    peer, _ = listening.accept()
    tune(peer)
    memory, question = memoryview(bytearray(b"\1" * length)), memoryview(bytearray(QUESTION_BYTES))
    while count := peer.recv_into(question):
        asked = bytes(question[:1])
        if asked == b"u":
            take(peer, memory)
            peer.sendall(question[:count])
        elif asked == b"d":
            peer.sendall(memory)
        else:
            peer.sendall(question[:count])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
