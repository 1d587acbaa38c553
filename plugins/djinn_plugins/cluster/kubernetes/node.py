"""What a Pod runs: the process that keeps one program running."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import msgspec

from djinn_plugins.cluster.keeping import keep
from djinn_plugins.cluster.kinds import ClusterSpec
from djinn_plugins.cluster.records import Records

__all__ = ("FOLDER", "SPEC", "main")

FOLDER = "djinn-engine"
"""The folder of the records, among the temporary files of the container."""
SPEC = "DJINN_ENGINE_SPEC"
"""The variable with the program. It comes from a Secret, because the program's own variables are in it."""
ENDED = 143
"""Exit status after SIGTERM. With 0, the Job would be complete where the Pod's node is drained."""


def main() -> NoReturn:
    """Run a program until SIGTERM asks to stop."""
    spec = _decoder.decode(os.environ.pop(SPEC))
    records = Records(Path(tempfile.gettempdir()) / FOLDER)
    records.folder.mkdir(mode=0o700, exist_ok=True)
    log = records.log_of(spec.programs[0].name)
    log.touch(mode=0o600)
    # So that the log of the container is that of the program. It ends with the container.
    with subprocess.Popen(["tail", "-n", "+1", "-F", str(log)], start_new_session=True) as following:  # noqa: S603, S607
        keep(records, spec)
        following.terminate()
    sys.exit(ENDED)


_decoder = msgspec.json.Decoder(ClusterSpec)
