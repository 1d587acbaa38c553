"""Other people's plugins keep the laws of their kinds; ``nox -s tests`` builds and installs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

FOLDERS = sorted((Path(__file__).parents[1] / "third_party").iterdir())


@pytest.mark.parametrize("distribution", [folder.name for folder in FOLDERS])
def test_laws_are_kept_as_their_authors_test_them(distribution: str, tmp_path: Path) -> None:
    """From an empty directory, in an interpreter of its own, with what is installed and nothing else."""
    try:
        version(distribution)
    except PackageNotFoundError:
        pytest.skip(f"pip install ./tests/third_party/{distribution}")
    environment = {name: value for name, value in os.environ.items()
                   if name != "PYTHONPATH" and not name.startswith(("DJINN_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "djinn_conformance",
         f"--djinn-plugin={distribution}"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
        check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^\w+ +{distribution}:\w+ +\d+ laws kept +0 broken", done.stdout, re.MULTILINE), done.stdout
