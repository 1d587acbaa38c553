"""Workers that native code has taken over: what it tries is refused, and nobody else is harmed. See takeover.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.processes.warm import clean_environment
from support.servers.connection_options import connect_options
from support.servers.serving import PROGRAM, workers_of

from djinn.errors import DjinnError, RefusedError, TransportError
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Free, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.server.sandbox import landlock, privileges, seccomp
from djinn_plugins.server.sandbox.fence import _closed
from djinn_plugins.server.sandbox.paths import files_for, unreadable_for_others
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect_tls

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's"),
    pytest.mark.timeout(600),
]
if sys.platform == "linux":
    from support.sandbox import takeover
    LACKING = seccomp.why_not() or landlock.why_not()
else:
    LACKING = ""
NOBODY = 65534
START_TIMEOUT_S = 240.0
CANARY = bytes(range(1, 33)) * 8
SHARED = torch.full((2**18,), 0.5)
"""An upload that the tenants share."""
TAKEOVERS = (
    "memory_of_another_tenant", "memory_of_the_gateway", "reading_files", "writing_files", "reaching_the_network",
    "starting_programs", "harming_other_processes", "gaining_privileges", "attacking_the_kernel",
    "sharing_what_is_others", "secrets_in_its_own_memory", "from_another_thread",
)
MASK = 0x5A


@attrs.define
class Fenced:
    """A server of two tenants, over TLS, with metrics, and what those who take over its workers are after."""

    process: subprocess.Popen[str]
    address: str
    folder: Path
    log: Path
    authority: str
    tokens: Mapping[str, str]
    metrics_port: int
    victim: SocketConnection
    target: dict[str, Any]

    def connect(self, tenant: str) -> SocketConnection:
        options = connect_options(token=self.tokens[tenant], tls_ca=self.authority, connect_timeout_s=START_TIMEOUT_S,
                                 resume=False, owner=f"secret of {tenant}")
        return connect_tls(self.address, options)

    def connect_soon(self, tenant: str) -> SocketConnection:
        """Connect, however long a worker takes to begin."""
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return self.connect(tenant)
            except RefusedError:
                assert time.monotonic() < until, self.log.read_text()
                time.sleep(0.5)

    def take_over(self, what: str) -> dict[str, str]:
        """Have native code do something in the worker of the hostile tenant."""
        connection = self.connect_soon("mallory")
        try:
            return run_attack(connection, what, self.target)
        finally:
            connection.close()

    def check(self) -> None:
        """The gateway and the other tenant's worker live, and have what they had."""
        assert self.process.poll() is None, self.log.read_text()
        _, tensors = self.victim.request(Batch(fetch=(1,)), ())
        assert bytes(tensors[0].tolist()) == CANARY
        _, tensors = self.victim.request(Batch(fetch=(2,)), ())
        assert torch.equal(tensors[0], SHARED)


def run_attack(connection: SocketConnection, what: str, target: dict[str, Any]) -> dict[str, str]:
    operand = takeover.asked(what, target)
    digest = facts_of(torch.ops.takeover.run.default).digest
    program = Program((Template("takeover::run", digest, (TensorArgument(),)),), (Step(0, (-1,), 1),), 1, (0,))
    result, tensors = connection.request(
        Batch([Upload(3, header_of(SHARED)), Upload(1, header_of(operand)), Define(1, program),
               Run(1, (1,), [], (2,))], fetch=(2,)), [SHARED, operand])
    assert not result.failures, result.failures
    connection.submit(Batch([Free((1, 2, 3))]), ())
    return takeover.answered(tensors[0])


def launched(mode: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """The command line of a server that runs as root, or as nobody, who can read no more than anybody."""
    server = [sys.executable, "-c", PROGRAM, "serve", "--threads", "2", *arguments]
    if mode == "root":
        if os.geteuid() != 0:
            pytest.skip("it takes root to start a server as root")
        return server
    if os.geteuid() != 0:
        return server
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("setpriv and unshare start a server as another user, and are not here")
    dropped = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", *server]
    shut = unreadable_for_others([sys.base_prefix, os.__file__])
    if not shut:
        return dropped
    # Python lies in a folder that only root can look into: show it to everybody, in a view of the server's own.
    inner = folder / "python"
    inner.mkdir()
    script = (f"mount --bind {sys.base_prefix} {inner} && mount -t tmpfs -o mode=755 none {shut} && "
              f'mkdir -p {sys.base_prefix} && mount --bind {inner} {sys.base_prefix} && exec "$@"')
    wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    if subprocess.run([*wrapped, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system does not let root mount anything, and nobody cannot read Python")
    return [*wrapped, *dropped]


@contextlib.contextmanager
def installed() -> Iterator[tuple[Path, Path]]:
    """A folder that a server's user may use, and one with the operator as a plugin."""
    with tempfile.TemporaryDirectory(prefix="djinn-sandbox-") as name:
        folder = Path(name)
        plugin = folder / "plugin"
        metadata = plugin / "takeover-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: takeover\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[djinn]\ntakeover = takeover\n")
        shutil.copy(takeover.__file__, plugin / "takeover.py")
        folder.chmod(0o755)
        yield folder, plugin


def started(command: list[str], folder: Path, plugin: Path) -> tuple[subprocess.Popen[str], str, Path]:
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=clean_environment(PYTHONPATH=str(plugin), OMP_NUM_THREADS="2"),
                                   stdout=subprocess.PIPE, stderr=errors, text=True, cwd="/")
    assert process.stdout is not None
    patience = threading.Timer(START_TIMEOUT_S, process.kill)
    patience.start()
    line = process.stdout.readline()
    patience.cancel()
    return process, line.strip().removeprefix("djinn serving "), log


def masked(secret: bytes) -> str:
    return bytes(byte ^ MASK for byte in secret).hex()


def keys_of(pem: Path) -> dict[str, str]:
    """The number that is a certificate's key, in the orders in which memory may have it, and a line of its file."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(pem.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    number = key.private_numbers().private_value
    lines = [line for line in pem.read_bytes().partition(b"PRIVATE KEY-----")[2].splitlines() if len(line) > 60]
    return {"key": masked(number.to_bytes(32, "big")), "key, lowest first": masked(number.to_bytes(32, "little")),
            "line of the key": masked(lines[0])}


@pytest.fixture(scope="module", params=["root", "unprivileged"])
def fenced(request: pytest.FixtureRequest, certificates: Any) -> Iterator[Fenced]:
    if LACKING:
        pytest.skip(LACKING)
    with installed() as (folder, plugin), contextlib.ExitStack() as stack:
        private = folder / "private"
        private.mkdir()
        tokens = {name: TokenFile(private / "tokens.json").create(name, share="lab") for name in ("mallory", "bob")}
        key = private / "server.pem"
        shutil.copy(certificates.server, key)
        (private / "of-a-user").write_text("of no concern")
        command = launched(request.param, folder, [
            "--sandbox", "require", "--tokens", str(private / "tokens.json"), "--tls-cert", str(key),
            "--metrics-port", "0", "--allow-namespace", "takeover"])
        for path in (private, *private.iterdir()):
            if request.param == "unprivileged" and os.geteuid() == 0:
                os.chown(path, NOBODY, NOBODY)
        process, address, log = started(command, folder, plugin)
        stack.callback(end, process)
        assert address, log.read_text()
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(folder / "listening"))
        listening.listen()
        (folder / "listening").chmod(0o777)
        metrics = int(log.read_text().partition("http://127.0.0.1:")[2].partition("/")[0])
        segment = ctypes.CDLL(None).shmget(0x5EC12E7, 4096, 0o1666)
        stack.callback(ctypes.CDLL(None).shmctl, segment, 0, None)
        server = Fenced(process, address, folder, log, certificates.authority, tokens, metrics,
                        None, {})  # type: ignore[arg-type]  # filled in below
        server.victim = server.connect_soon("bob")
        stack.callback(server.victim.close)
        secret = torch.frombuffer(bytearray(CANARY), dtype=torch.uint8)
        server.victim.request(Batch([Upload(1, header_of(secret)), Upload(2, header_of(SHARED))], synchronize=True),
                              [secret, SHARED])
        (victim,) = workers_of(process.pid)
        server.target = {
            "gateway": process.pid, "victim": victim, "unix": str(folder / "listening"),
            "ports": [int(address.rpartition(":")[2]), metrics], "log": [str(log)],
            "secrets": [str(path) for path in sorted(private.iterdir(), reverse=True)],
            "shared": segment, "shared_key": 0x5EC12E7,
            "hidden": {"canary": masked(CANARY), **keys_of(key), **{f"token of {name}": masked(token.encode())
                                                    for name, token in tokens.items()}},
        }
        yield server


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("what", TAKEOVERS)
def test_native_code_in_a_worker_reaches_nothing(fenced: Fenced, what: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in (fenced.folder / "private").iterdir())
    logged = fenced.log.read_bytes()
    found = fenced.take_over(what)
    assert len(found) >= 3
    assert what != "sharing_what_is_others" or any(name.startswith("shared upload") for name in found)
    assert not {name: outcome for name, outcome in found.items() if outcome.startswith(takeover.DONE)}
    fenced.check()
    assert fenced.log.read_bytes().startswith(logged)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (fenced.folder / "private").iterdir())


@pytest.mark.parametrize("what", ["crashing", pytest.param("other_architecture", marks=pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="only x86_64 has two ways of making system calls"))])
def test_what_kills_a_worker_leaves_no_image_and_the_next_one_serves(fenced: Fenced, what: str) -> None:
    images = set(Path("/").glob("core*")) | set(Path("/tmp").glob("core*"))  # where they would be
    with pytest.raises(TransportError):
        fenced.take_over(what)
    fenced.check()
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            assert fenced.take_over("from_another_thread")
            break
        except DjinnError:
            assert time.monotonic() < until
            time.sleep(0.5)
    assert set(Path("/").glob("core*")) | set(Path("/tmp").glob("core*")) == images  # as above


def status_of(process: int) -> dict[str, str]:
    text = Path(f"/proc/{process}/status").read_text()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def test_files_that_tell_a_process_about_itself_are_no_reason_to_read_all_files() -> None:
    assert not _closed(files_for(has_driver=False).readable).startswith("/proc")


def test_a_worker_has_given_up_what_it_does_not_need(fenced: Fenced) -> None:
    hostile = fenced.connect_soon("mallory")
    workers = [status_of(worker) for worker in workers_of(fenced.process.pid)]
    hostile.close()
    assert len(workers) == 2
    gateway = status_of(fenced.process.pid)
    reads_anywhere = 1 << 2 if unreadable_for_others([os.__file__]) else 0
    for worker in workers:
        assert (worker["NoNewPrivs"], worker["Seccomp"]) == ("1", "2")
        assert int(worker["CapBnd"], 16) & ~reads_anywhere == 0 or gateway["Uid"].split()[0] != "0"
        assert {int(worker[name], 16) & ~reads_anywhere for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    users = [worker["Uid"].split() for worker in workers]
    if gateway["Uid"].split()[0] == "0":
        assert not privileges.why_no_user()
        assert len({user[0] for user in users}) == 2
        assert all(len(set(user)) == 1 and int(user[0]) >= privileges.SMALL_FIRST_USER for user in users)
        assert {worker["Groups"] for worker in workers} == {""}
    for worker in workers_of(fenced.process.pid):
        # A process that lets itself be looked at belongs to its user; these belong to root.
        assert Path(f"/proc/{worker}/environ").stat().st_uid == 0
        limits = Path(f"/proc/{worker}/limits").read_text()
        assert any(line.split()[4:6] == ["0", "0"] for line in limits.splitlines() if "core file size" in line)


def test_training_and_threads_and_modules_that_come_late_work_behind_the_fence(fenced: Fenced) -> None:
    import djinn

    try:
        djinn.init(server=fenced.address, token=fenced.tokens["mallory"], tls_ca=fenced.authority)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(),
                                    torch.nn.LazyLinear(64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))
        model(torch.randn(2, 3, 16, 16))
        model = model.to("remote_accelerator:0")
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(16, 3, 16, 16, device="remote_accelerator:0")
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(x).logsumexp(1).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        large = torch.ones(2**26, device="remote_accelerator:0")
        assert large.sum().item() == 2**26
        square = torch.randn(300, 300, device="remote_accelerator:0")
        assert torch.allclose((torch.linalg.inv(square) @ square).cpu(), torch.eye(300), atol=1e-2)
        assert torch.fft.fft(square).abs().cpu().isfinite().all()
    finally:
        djinn.shutdown()
    fenced.check()


