"""What `nox -s chaos -- surroundings` does to what a server stands on: clocks, disks, certificates, kernels, peers."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.clients.tenants import session
from support.sandbox import takeover
from support.servers.connection_options import connect_options
from support.servers.upload_sessions import UploadSession
from support.surroundings import kernels, web_tokens
from support.surroundings.authority import CLIENT, SERVER, Authority
from support.surroundings.cold_server import ColdServer, MovedClock

import djinn
from djinn.errors import DjinnError
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire import messages
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Define, Failure, PeerHello, Plain, Run, Upload, ValueTransfer
from djinn.wire.tensors import header_of
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.wire.frames import encode_head
from djinn_plugins.server.tickets import VALID_S
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these surroundings are Linux's")
is_root = pytest.mark.skipif(sys.platform == "linux" and os.geteuid() != 0, reason="it takes root")
Tell = Callable[[str, str], None]
DEVICE = "remote_accelerator:0"
HOUR_S, DAY_S = 3600, 86_400
ONES = torch.ones(4)
KEPT = 'import djinn, sys, torch\ndjinn.init(server=sys.argv[1], token=sys.argv[2], name="lab")\n'


def works(connection: SocketConnection) -> bool:
    result, data = connection.request(Batch([Upload(1, header_of(ONES))], fetch=(1,)), [ONES])
    return not result.failures and torch.equal(data[0], ONES)


def outcome(attempt: Callable[[], Any]) -> str:
    """Return the error that comes of an attempt; empty if there is none."""
    try:
        connection = attempt()
        assert works(connection)
        connection.close()
    except DjinnError as error:
        return f"{type(error).__name__}: {error.summary}"
    return ""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clocks_that_jump(tmp_path: Path, tell: Tell) -> None:
    clock, tokens = MovedClock(tmp_path), TokenFile(tmp_path / "tokens.json")
    lasting, first = tokens.create("alice"), tokens.create("carol")
    ending = tokens.create("bob", expires=int(time.time()) + HOUR_S // 2)
    second = tokens.rotate("carol", HOUR_S // 2)
    with ColdServer(tmp_path / "log", "--tokens", str(tokens.path), "--named-lease-s", str(HOUR_S), "--max-run-s", "60",
                    XDG_RUNTIME_DIR=str(tmp_path), **clock.environment) as server:
        run(f'{KEPT}djinn.kept["x"] = torch.full((3,), 7.0, device="{DEVICE}")', server.address, lasting)
        running, jumps, ended, passed_s = session(server.address, lasting), 0, 0, 0
        for moved_s in (HOUR_S, -HOUR_S, DAY_S, -DAY_S):
            old = [session(server.address, token) for token in (ending, first)]
            clock.move(moved_s, passed_s)
            time.sleep(1.5)
            for token, connection in zip((ending, first), old, strict=True):
                is_over = moved_s > 0
                assert outcome(lambda token=token: session(server.address, token)).startswith("TokenEnded") == is_over
                assert bool(outcome(lambda connection=connection: connection)) == is_over
                ended += is_over
            assert works(running)
            for token in (lasting, second):
                assert not outcome(lambda token=token: session(server.address, token))
            # Within the time of a ticket, a worker refuses a token that has ended.
            passed_s += int(VALID_S)
            clock.move(0, passed_s)
            time.sleep(0.5)
            assert works(running)
            jumps += 2
        # Asleep: nothing runs, the monotonic clock stands, and the time of day goes on.
        server.signal(signal.SIGSTOP)
        clock.move(HOUR_S, passed_s)
        time.sleep(3)
        server.signal(signal.SIGCONT)
        assert works(running)
        clock.move(0, 2 * HOUR_S)
        assert works(running)
        time.sleep(1.5)
        gone = run(f"{KEPT}print(sorted(djinn.kept))", server.address, lasting)
        assert gone.strip() == "[]"
        running.close()
    assert server.status == 0
    assert "Traceback" not in server.text
    tell(f"The time of day jumps {jumps} times, by an hour or a day, both ways; the machine sleeps; the monotonic "
         "clock jumps by two hours", f"sessions, and new ones, work all the while; {ended} sessions of tokens whose "
         "end, or overlap, was over by the new time ended with DJ318 within 1.5 s; when the clock was set back, their "
         "tokens were good again, after the 30 s of a ticket at most; leases follow the monotonic clock only")


@is_root
def test_disks_that_are_full(tmp_path: Path, tell: Tell) -> None:
    disk, logs = tmp_path / "disk", tmp_path / "logs"
    disk.mkdir()
    logs.mkdir()
    script = (f"mount -t tmpfs -o size=3m none {disk} && mount -t tmpfs -o size=64k none {logs} && "
              f'mkdir {disk}/models {disk}/run && exec "$@" 2>{logs}/log')
    large, small = tmp_path / "large.safetensors", tmp_path / "small.safetensors"
    save_file({"x": torch.arange(2.0**20)}, large)
    save_file({"x": torch.arange(2.0**15)}, small)
    with ColdServer(tmp_path / "log", "--models", str(disk / "models"), "--keep-models-mib", "64",
                    within=["unshare", "--mount", "sh", "-c", script, "sh"],
                    XDG_RUNTIME_DIR=str(disk / "run")) as server:
        assert server.address, server.text
        there, logged = (Path(f"/proc/{server.process.pid}/root{each}") for each in (disk, logs))
        fills, tried, lengths = (there / "fill", logged / "fill"), 0, []

        def remount(how: str) -> None:
            subprocess.run(["nsenter", "-m", "-t", str(server.process.pid), "mount", "-o", f"remount,{how}", disk],
                           check=True)

        for state in ("room", "full", "room", "read-only"):
            for fill in fills:
                fill.unlink(missing_ok=True)
                if state == "full":
                    with pytest.raises(OSError, match="No space"):
                        fill.write_bytes(bytes(2**22))
            if state == "read-only":
                remount("ro")
            djinn.init(server=server.address, log_level="ERROR")
            for file in (large, small):
                found = load_file(file, device=DEVICE)["x"]
                assert torch.equal(found.cpu(), load_file(file)["x"])
                tried += 1
            assert torch.ones(3, device=DEVICE).sum().item() == 3
            djinn.shutdown()
            lengths.append((logged / "log").stat().st_size)
        log = (logged / "log").read_text()
        kept = sorted(path.name for path in there.rglob("*.part"))
        assert log.count("cannot be kept") >= 3
    assert server.status == 0
    assert kept == []
    assert lengths[1] < lengths[2]
    assert "Traceback" not in log
    tell("A server's disks have too little room, are full, have room again, cannot be written: log, operator's socket, "
         "folder of kept files", f"{tried} of {tried} model files right, none kept in part; sessions unharmed, exit "
         "status 0; the log goes on once there is room")


def test_certificates(tmp_path: Path, tell: Tell) -> None:
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    leaf = Authority(tmp_path, "leaf", authority, is_authority=False)
    local = "127.0.0.1"
    good, again = authority.issue("good", local)[0], authority.issue("again", local)[0]
    client, number = authority.issue("client")
    servers = {
        "expired": authority.issue("s1", local, first_day=-5, last_day=-1), "later": authority.issue(
            "s2", local, first_day=1, last_day=2), "elsewhere": authority.issue("s3", "elsewhere.example.org"),
        "no name": authority.issue("s4"), "a pattern": authority.issue("s5", "*.0.0.1"), "a client's": authority.issue(
            "s6", local, uses=(CLIENT,)), "another's": other.issue("s7", local), "a leaf's": leaf.issue(
            "s8", local, chained=True)}
    clients = {"none": "", "another's": other.issue("c1")[0], "expired": authority.issue(
        "c2", first_day=-5, last_day=-1)[0], "later": authority.issue("c3", first_day=1, last_day=3)[0],
        "a server's": authority.issue("c4", uses=(SERVER,))[0], "a leaf's": leaf.issue("c5", chained=True)[0]}
    used, trusted = tmp_path / "used.pem", tmp_path / "trusted.pem"
    shutil.copy(good, used)
    shutil.copy(authority.path, trusted)
    with ColdServer(tmp_path / "log", "--tls-cert", str(used), "--tls-client-ca", str(trusted),
                    XDG_RUNTIME_DIR=str(tmp_path)) as server:
        port = int(server.address.rpartition(":")[2])

        def begin(shown: str = client) -> SocketConnection:
            return connect_tls(server.address, connect_options(tls_ca=authority.path, tls_cert=shown, resume=False))

        def reload(word: str) -> None:
            before = server.text.count(word)
            server.process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 20
            while server.text.count(word) == before:
                assert time.monotonic() < until, server.text
                time.sleep(0.02)

        running = begin()
        for path, _ in servers.values():
            shutil.copy(path, used)
            reload("INFO djinn.server: reloaded")
            assert "its certificate is not trusted" in outcome(begin)
            assert works(running)
        shutil.copy(again, used)
        reload("INFO djinn.server: reloaded")
        first, second = (Path(path).read_text() for path in (good, again))
        broken = (first[:first.index("-----BEGIN CERT")] + second[second.index("-----BEGIN CERT"):],
                  first[first.index("-----BEGIN CERT"):], "x", "", first[:-40])
        for content in broken:
            used.write_text(content)
            reload("not reloaded")
            assert not outcome(begin)
        shutil.copy(again, used)
        for shown in clients.values():
            assert "it wants a certificate of this client" in outcome(lambda shown=shown: begin(shown))
        shutil.copy(authority.revoking(number), trusted)
        reload("INFO djinn.server: reloaded")
        assert "certificate revoked" in outcome(begin)
        shutil.copy(authority.path, trusted)
        reload("INFO djinn.server: reloaded")
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_ciphers("ALL:@SECLEVEL=0")
            with warnings.catch_warnings(action="ignore"):
                context.minimum_version = context.maximum_version = version
            with (socket.create_connection((local, port)) as sock,
                  pytest.raises(OSError, match="alert protocol version")):
                context.wrap_socket(sock)
        hello = bytes.fromhex("16030102000100")
        half = [socket.create_connection((local, port)) for _ in range(300)]
        for place, sock in enumerate(half):
            sock.sendall(hello[:1 + place % len(hello)])
        waited_s = greeting_s(begin)
        for sock in half:
            sock.close()
        assert works(running)
        running.close()
    assert server.status == 0
    assert "Traceback" not in server.text
    assert waited_s < 5
    tell(f"Over TLS: {len(servers)} kinds of false certificates swapped in while a session runs, {len(broken)} broken "
         f"files, {len(clients) + 1} false clients (one revoked), 3 earlier protocols, 300 half handshakes",
         f"each refused, by name; the session, and after a broken file the certificate before it, unharmed; beside the "
         f"half handshakes a greeting took {waited_s:.2f} s")


def greeting_s(begin: Callable[[], SocketConnection]) -> float:
    """Return how long the slowest of some greetings takes."""
    slowest_s = 0.0
    for _ in range(5):
        began = time.monotonic()
        assert not outcome(begin)
        slowest_s = max(slowest_s, time.monotonic() - began)
    return slowest_s


def plugin(folder: Path, name: str, modules: dict[str, str]) -> str:
    """Install a plugin into a folder, and return the path of modules with it."""
    metadata = folder / "plugin" / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[djinn]\n{name} = {name}\n")
    for path, content in modules.items():
        (folder / "plugin" / path).parent.mkdir(exist_ok=True)
        (folder / "plugin" / path).write_text(content)
    return os.pathsep.join(filter(None, [str(folder / "plugin"), os.environ.get("PYTHONPATH", "")]))


def test_json_web_tokens(tmp_path: Path, tell: Tell) -> None:
    name, key = "djinn_authenticator_jwt", tmp_path / "key.pem"
    key.write_bytes(web_tokens.PEM)
    path = plugin(tmp_path, name, {f"{name}/{each}": web_tokens.code_of(each)
                                   for each in ("__init__.py", "authenticator.py")})
    with ColdServer(tmp_path / "log", "--plugins", "authenticator=jwt", PYTHONPATH=path, DJINN_JWT_KEY=str(key),
                    XDG_RUNTIME_DIR=str(tmp_path)) as server:
        assert not outcome(lambda: session(server.address, web_tokens.GOOD))
        for token in web_tokens.WRONG.values():
            assert outcome(lambda token=token: session(server.address, token))
        assert not outcome(lambda: session(server.address, web_tokens.GOOD))
    assert "the authenticator failed" not in server.text
    tell("The example of an authenticator for JSON Web Tokens gets false ones: algorithms, keys, claims, ends, forms",
         f"{len(web_tokens.WRONG)} of {len(web_tokens.WRONG)} refused")


LACKING = {"": (), "files": (kernels.LANDLOCK,), "system calls": (kernels.SECCOMP,),
           "system calls, files": (kernels.SECCOMP, kernels.LANDLOCK)}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of calls are those of x86_64")
def test_kernels_without_parts_of_the_sandbox(tmp_path: Path, tell: Tell) -> None:
    tmp_path.chmod(0o755)
    path = plugin(tmp_path, "takeover", {"takeover.py": Path(takeover.__file__).read_text()})
    secret = tmp_path / "secret"
    secret.write_text("of no concern")
    said = []
    for missing, parts in LACKING.items():
        prelude, given = kernels.without(*parts), {"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": path}
        with ColdServer(tmp_path / "log", "--sandbox", "require", prelude=prelude, **given) as server:
            assert bool(server.address) == (not missing)
            assert not missing or (server.status == 2 and f"require: {missing.partition(',')[0]}: " in server.text)
        doctor = subprocess.run([sys.executable, "-c",
                                 f"{prelude}from djinn_plugins.cli.app import main; main(['doctor'])"],
                                capture_output=True, text=True, check=False, env=os.environ | given).stdout
        for part in filter(None, missing.split(", ")):
            assert f"sandbox of servers: {part}" in doctor
            assert "not here: the kernel" in doctor.partition(f"sandbox of servers: {part}")[2].partition("\n")[0]
        with ColdServer(tmp_path / "log", "--allow-namespace", "takeover", prelude=prelude, **given) as server:
            assert all(f"sandbox without {part}: the kernel" in server.text
                       for part in filter(None, missing.split(", ")))
            counts = [done_of(server, what, secret) for what in ("reading_files", "memory_of_the_gateway")]
        assert missing or not any(done for done, _ in counts)
        kernel = "neither" if "," in missing else f"no fence of {missing}" if missing else "both"
        said.append(f"with {kernel}, {' and '.join(f'{done} of {tried}' for done, tried in counts)}")
    tell("Servers on kernels without Landlock (files), without filters of system calls, and with neither; native code "
         "in a worker tries to read files, and from the gateway's process", f"`--sandbox require` ends with status 2 "
         f"and names the part, the log and `djinn doctor` name it, too, and sessions work; attempts that succeed: "
         f"{'; '.join(said)}")


def done_of(server: ColdServer, what: str, secret: Path) -> tuple[int, int]:
    """Count what native code in a worker reaches, and what it tries, of what harms nobody."""
    operand = takeover.asked(what, {"secrets": [str(secret)], "gateway": server.process.pid})
    digest = facts_of(torch.ops.takeover.run.default).digest
    program = Program((Template("takeover::run", digest, (TensorArgument(),)),), (Step(0, (-1,), 1),), 1, (0,))
    connection = session(server.address)
    _, tensors = connection.request(Batch([Upload(1, header_of(operand)), Define(1, program), Run(1, (1,), [], (2,))],
                                          fetch=(2,)), [operand])
    connection.close()
    found = takeover.answered(tensors[0]).values()
    return sum(each.startswith(takeover.DONE) for each in found), len(found)


def test_peers_that_flood(tmp_path: Path, tell: Tell) -> None:
    number = torch.ones(16)
    floods = {
        "small values": lambda index: ValueTransfer(index, Plain(1)),
        "reports of failures": lambda index: ValueTransfer(
            index, header_of(number), told=(Failure(1, "ValueError", "x" * 10**6, source="there"),) * 10),
        "lists of lists": lambda index: ValueTransfer(index, Plain([[]] * 10_000))}
    with ColdServer(tmp_path / "log", XDG_RUNTIME_DIR=str(tmp_path)) as server:
        receiving = connect(server.address, ConnectOptions())
        assert works(receiving)
        (worker,) = server.workers
        before, grown = used_mib(worker), []
        for name, made in floods.items():
            greeting = messages.encode(PeerHello(PROTOCOL_VERSION, sys.byteorder, receiving.welcome.mailbox, name))
            with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), timeout=2) as peer:
                peer.sendall(encode_head(1, len(greeting), 0) + greeting)
                peer.recv(4096)
                index, until = 0, time.monotonic() + 60
                try:
                    while time.monotonic() < until:
                        index += 1
                        header = messages.encode(made(index))
                        body = bytes(number.nbytes) if name == "reports of failures" else b""
                        peer.sendall(encode_head(index + 1, len(header), len(body)) + header + body)
                except TimeoutError:
                    pass
                else:
                    pytest.fail(f"it takes {index} {name}")
                assert works(receiving)
                grown.append(used_mib(worker) - before)
        receiving.close()
    assert server.status == 0
    assert max(grown) < 700
    tell("Peers of a session send what it never takes: small values, reports of failures, lists of lists",
         f"each is held up; the session lives; its worker had grown by {', '.join(f'{each:.0f}' for each in grown)} "
         "MiB after each")


def test_uploads_that_lie(tmp_path: Path, tell: Tell) -> None:
    """Equal ones, ones that differ where nobody looks first, and ones that end in the middle, at the same time."""
    tokens = TokenFile(tmp_path / "tokens.json")
    given = [tokens.create(name, share="lab") for name in ("alice", "bob", "carol")]
    whole = torch.ones(2**18)
    header, rounds = header_of(whole), 20
    mark = mark_of(header, whole)
    like = next(other for place in range(1000, 2000)
                if mark_of(header, other := whole.index_fill(0, torch.tensor(place), 2.0)) == mark)
    with ColdServer(tmp_path / "log", "--tokens", str(tokens.path), "--keep-mib", "256",
                    XDG_RUNTIME_DIR=str(tmp_path)) as server:
        sessions = [UploadSession(server.address, token=token, owner=f"secret of {token}") for token in given]
        for turn in range(rounds):
            sent = [(whole, like)[(turn >> place) % 2] + turn for place in range(3)]
            cut = threading.Thread(target=cut_short, args=(server, given[turn % 3], sent[turn % 3]))
            racing = [threading.Thread(target=each.upload, args=(10 + turn, tensor))
                      for each, tensor in zip(sessions, sent, strict=True)]
            for thread in (cut, *racing):
                thread.start()
            for thread in (cut, *racing):
                thread.join()
            for each, tensor in zip(sessions, sent, strict=True):
                assert each.sum_of(10 + turn) == float(tensor.sum())
            sessions[turn % 3].double(10 + turn)
            for place, (each, tensor) in enumerate(zip(sessions, sent, strict=True)):
                assert each.sum_of(10 + turn) == float(tensor.sum()) * (2 if place == turn % 3 else 1)
        for each in sessions:
            each.connection.close()
    assert server.status == 0
    assert "Traceback" not in server.text
    tell(f"{3 * rounds} uploads of three tenants of a group race, equal ones and ones whose marks are equal; {rounds} "
         "more end in the middle, and one of three is written to", "each session has the bytes that it sent")


def cut_short(server: ColdServer, token: str, tensor: torch.Tensor) -> None:
    """Upload half a tensor, and leave."""
    connection = session(server.address, token)
    message = messages.encode(Batch([Upload(1, header_of(tensor))]))
    with socket.socket(fileno=os.dup(connection._frames.stream.fileno())) as sock:
        sock.sendall(encode_head(2, len(message), tensor.nbytes) + message + bytes(tensor.nbytes // 2))
    connection.close()


def used_mib(process: int) -> float:
    return int(Path(f"/proc/{process}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024
