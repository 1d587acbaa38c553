"""Where nothing can be written, what there was stays, nothing is left that stands in the way, and it is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.processes.warm import run_python
from support.servers.serving import Serving

import djinn
from djinn_plugins.server.operator_socket import OperatorSocket
from djinn_plugins.server.tokens.tokens import TokenFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of files and the full device are Linux's")
WRITES = """
import os, resource, sys
from pathlib import Path
from djinn.errors import ConfigurationError
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
folder = Path(sys.argv[1])

def key():
    from djinn_plugins.common.files.secret_files import key_in
    key_in(folder / "state" / "key", makes=True)

def token():
    from djinn_plugins.server.tokens.tokens import TokenFile
    TokenFile(folder / "tokens.json").create("bob")

def cluster():
    from djinn_plugins.cluster.commands import _start
    from djinn_plugins.cluster.clusters import Cluster
    _start(Cluster("lab", "local"), [])

os.environ["XDG_STATE_HOME"] = str(folder / "state")
for write in (key, token, cluster):
    try:
        write()
    except ConfigurationError as error:
        print(error.summary)
"""
PRINTS = """
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
from djinn_plugins.cli.app import main
main(["token", "create", "eve", "--tokens", sys.argv[1]])
"""
FULL = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    tokens.create("ann")
    before = tokens.path.read_bytes()
    done = run_python(WRITES, str(tmp_path))
    assert [line.partition(" cannot be ")[2][:8] for line in done.stdout.splitlines()] == [
        "read or ", "written:", "read or "], done
    assert tokens.path.read_bytes() == before
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"tokens.json", ".tokens.json.lock"}


def test_a_token_that_cannot_be_printed_is_said_to_be_unknown(tmp_path: Path) -> None:
    done = run_python(PRINTS, str(tmp_path / "tokens.json"))
    assert done.returncode == 2, done
    assert "[DJ101] The token cannot be printed: No space left on device" in done.stderr
    assert "djinn token rotate eve" in done.stderr


def test_a_server_whose_log_cannot_be_written_serves(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", prelude=FULL) as server:
        djinn.init(server=server.address)
        assert torch.ones(3, device="remote_accelerator:0").sum().item() == 3
        djinn.shutdown()
        assert server.process.poll() is None


def test_a_socket_that_cannot_be_removed_keeps_no_server_from_ending(tmp_path: Path) -> None:
    made = OperatorSocket(tmp_path / "socket", {})
    made.path.unlink()
    made.path.mkdir()
    made.close()
    assert made.path.is_dir()
