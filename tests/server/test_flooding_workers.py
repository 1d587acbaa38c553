"""Workers that flood the gateway: it takes little for them, and nobody else waits. See flooding.py."""

from __future__ import annotations

import os
import shutil
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.servers.connection_options import connect_options
from support.servers.serving import Serving

import djinn
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.operators.stored_models import stored_operators
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes as Linux shows them"),
              pytest.mark.timeout(300)]
if sys.platform == "linux":
    from support.sandbox import flooding
    KINDS = [(kind, 0) for kind in flooding.KINDS] + [(kind, 1) for kind in ("reports", "nested", "no text")]
else:
    KINDS = []
HOSTILE = [f"mallory{number}" for number in range(len(KINDS))]
MODELS = 400
REQUESTS = 200
NESTED_BYTES = 2**20
ROOM_BYTES = 64 * 2**20
FILES = 48
"""More than the gateway has open for the questions of one worker."""
LATE_S = 0.2
WATCH_S = 2.0


@attrs.frozen
class Flooded:
    """A server of two tenants, one of which floods the gateway."""

    server: Serving
    file: TokenFile
    tokens: dict[str, str]

    def connect(self, tenant: str) -> SocketConnection:
        return connect(self.server.address, connect_options(token=self.tokens[tenant], resume=False,
                                                            connect_timeout_s=60.0))

    def greeting_s(self) -> float:
        begun = time.monotonic()
        self.connect("bob").close()
        return time.monotonic() - begun

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def files(self) -> int:
        return len(list(Path(f"/proc/{self.server.process.pid}/fd").iterdir()))


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flooded]:
    folder = tmp_path_factory.mktemp("flooded")
    metadata = folder / "plugin" / "flooding-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flooding\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[djinn]\nflooding = flooding\n")
    shutil.copy(flooding.__file__, folder / "plugin" / "flooding.py")
    models = folder / "models"
    models.mkdir()
    for number in range(MODELS):
        path = models / f"{'a long name ' * 14}{number}.safetensors"
        path.write_bytes(struct.pack("<Q", 2) + b"{}")
        os.utime(path, (1, 1))
    file = TokenFile(folder / "tokens.json")
    tokens = {name: file.create(name, share="lab") for name in ("bob", *HOSTILE)}
    with Serving(folder / "log", "--tokens", str(folder / "tokens.json"), "--models", str(models), "--keep-models-mib",
                 "64", "--keep-mib", "512", "--peers", "192.0.2.0/24", "--allow-namespace",
                 "flooding", PYTHONPATH=str(folder / "plugin")) as server:
        made = Flooded(server, file, tokens)
        [made.greeting_s() for _ in range(3)]
        yield made


def begin(connection: SocketConnection, **wish: Any) -> None:
    request = torch.frombuffer(bytearray(str(wish).replace("'", '"').encode()), dtype=torch.uint8)
    digest = facts_of(torch.ops.flooding.run.default).digest
    program = Program((Template("flooding::run", digest, (TensorArgument(),)),), (Step(0, (-1,), 1),), 1, (0,))
    result, _ = connection.request(Batch([Upload(1, header_of(request)), Define(1, program), Run(1, (1,), [], (2,))],
                                         fetch=(2,)), [request])
    assert not result.failures, result.failures


@pytest.mark.parametrize(("kind", "channel"), KINDS, ids=[
    f"{kind}{' for turns' * channel}".replace(" ", "-") for kind, channel in KINDS])
def test_a_worker_that_asks_and_reads_nothing_costs_the_gateway_little(
        kind: str, channel: int, flooded: Flooded) -> None:
    before = sorted(flooded.greeting_s() for _ in range(5))
    name = HOSTILE[KINDS.index((kind, channel))]
    hostile = flooded.connect(name)
    memory_bytes, files = flooded.memory_bytes(), flooded.files()
    begin(hostile, kind=kind, count=REQUESTS, channel=channel)
    late, most_bytes, most_files, until = list[float](), 0, 0, time.monotonic() + WATCH_S
    while time.monotonic() < until:
        late.append(flooded.greeting_s())
        most_bytes = max(most_bytes, flooded.memory_bytes())
        most_files = max(most_files, flooded.files())
    print(f"{kind}: {(most_bytes - memory_bytes) / 2**20:.1f} MiB, {most_files - files} files, greetings "
          f"{statistics.median(before):.3f} before, {statistics.median(late):.3f} median, {max(late):.3f} s at most")
    flooded.file.revoke(name)
    hostile.close()
    assert most_bytes - memory_bytes < ROOM_BYTES
    assert most_files - files < FILES
    assert statistics.median(late) < statistics.median(before) + LATE_S


def test_the_nested_header_of_a_kept_file_costs_the_gateway_little(flooded: Flooded) -> None:
    header = b'{"a":[' + b"[]," * (NESTED_BYTES // 3) + b"1]}"
    data = struct.pack("<Q", len(header)) + header
    digest = sha256(data).hexdigest()
    before = statistics.median(flooded.greeting_s() for _ in range(5))
    memory_bytes, answers, late = flooded.memory_bytes(), list[torch.Tensor](), list[float]()
    djinn.init(server=flooded.server.address, token=flooded.tokens["bob"])

    def send() -> None:
        for begin in range(0, len(data), 2**20):
            piece = torch.frombuffer(bytearray(data[begin:begin + 2**20]), dtype=torch.uint8).to("remote_accelerator:0")
            answers.append(stored_operators().keep(piece, digest, "w", begin, len(data)).cpu())

    sending = threading.Thread(target=send)
    sending.start()
    while sending.is_alive():
        late.append(flooded.greeting_s())
    djinn.shutdown()
    print(f"{flooded.memory_bytes() - memory_bytes} bytes, greetings {before:.3f} before, {max(late):.3f} s at most")
    assert b"cannot be kept: its header" in bytes(answers[-1].tolist())
    assert flooded.memory_bytes() - memory_bytes < ROOM_BYTES
    assert statistics.median(late) < before + LATE_S / 2
