"""How many sessions a server opens in a second: a client that connects and leaves again, alone and as one of eight.

``python tests/benchmarks/bench_handshakes.py`` prints a table. With ``--against PYTHON``, the djinn that is installed
for another interpreter is measured too, by turns, and the geometric mean of the ratios is printed: above 1, this one is
faster.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENT = """
import sys, time
from djinn_plugins.common.settings.connection import TlsSettings
from djinn_plugins.transport.tcp.client import connect, connect_tls
from djinn.kinds.transport import ConnectOptions
from djinn.settings import Settings

address, authority, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
options = ConnectOptions(settings=Settings(TlsSettings(tls_ca=authority)) if authority else Settings())
opened = connect_tls if authority else connect
opened(address, options).close()
print("ready", flush=True)
sys.stdin.readline()
count, began = 0, time.monotonic()
while time.monotonic() - began < seconds:
    opened(address, options).close()
    count += 1
print(count / (time.monotonic() - began))
"""


class Server:
    """``djinn serve`` of an interpreter."""

    def __init__(self, python: str, folder: Path, scheme: str) -> None:
        self._python = python
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        options: list[str] = []
        self._authority = ""
        if scheme == "tls":
            import trustme

            authority = trustme.CA()
            made, self._authority = folder / "server.pem", str(folder / "authority.pem")
            authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(made)
            authority.cert_pem.write_to_path(self._authority)
            options = ["--tls-cert", str(made)]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [python, "-P", "-c", "from djinn_plugins.cli.app import main; main()", "serve", "--port", "0",
             "--threads", "1", "--drain-s", "0", *options],
            env=self._environment, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=folder)
        assert self._process.stdout is not None
        self._address = self._process.stdout.readline().strip().removeprefix("djinn serving ")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate()
        self._log.close()

    def sessions_per_s(self, clients: int, seconds: float) -> float:
        """Count the sessions that clients open in a second, all together."""
        running = [subprocess.Popen([self._python, "-P", "-c", CLIENT, self._address, self._authority, str(seconds)],
                                    env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                   for _ in range(clients)]
        for client in running:
            assert client.stdout is not None
            client.stdout.readline()
        for client in running:
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.flush()
        return sum(float(client.communicate()[0]) for client in running)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--against", help="Python of an environment with another djinn")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=3.0)
    options = asked.parse_args()
    interpreters = [sys.executable, *([options.against] if options.against else [])]
    print(f"{'scheme':8}{'clients':>8}{'sessions/s':>12}" + (f"{'other':>8}{'ratio':>8}" if options.against else ""))
    for scheme in ("tcp", "tls"):
        with tempfile.TemporaryDirectory() as folder:
            servers = []
            for number, python in enumerate(interpreters):
                own = Path(folder) / str(number)
                own.mkdir()
                servers.append(Server(python, own, scheme))
            try:
                _measure(scheme, servers, options.rounds, options.seconds)
            finally:
                for server in servers:
                    server.stop()


def _measure(scheme: str, servers: list[Server], rounds: int, seconds: float) -> None:
    for clients in (1, 8):
        found: list[list[float]] = [[] for _ in servers]
        for turn in range(rounds):
            numbers = range(len(servers))
            for number in numbers if turn % 2 == 0 else reversed(numbers):
                found[number].append(servers[number].sessions_per_s(clients, seconds))
        line = f"{scheme:8}{clients:8}{statistics.median(found[0]):12.0f}"
        if len(found) > 1:
            ratio = math.exp(statistics.mean(math.log(here / there) for here, there in zip(*found, strict=True)))
            line += f"{statistics.median(found[1]):8.0f}{ratio:8.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
