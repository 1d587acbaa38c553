"""Scripts of libraries run on the CPU, with ``djinn run`` in their process, and with ``djinn run`` on a server.

``nox -s libraries`` runs this; the scripts have never heard of djinn, and print what they computed.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.warm import clean_environment
from support.servers.serving import Serving

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
DJINN = ("-c", "from djinn_plugins.start import main; main()", "run", "--strict")
TOLERANCE = 1e-5
"""Relative to the largest number. Most are equal; of a sum over a whole model the last digit may differ."""
_REPORT = re.compile(r"(?m)^djinn run: ([\d,]+) operations on (\S+|this process) \(\S+\), ([\d,]+) round trips?")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Serving(tmp_path_factory.mktemp("server") / "log") as server:
        yield server.address


def run(*arguments: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Run Python; return what the script computed, and what stands on standard error."""
    environment = clean_environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def difference(got: Any, wanted: Any) -> float:
    """The largest difference of two results, relative to the largest number of the same entry."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        return max((difference(got[name], wanted[name]) for name in wanted), default=0.0)
    left, right = numbers(got), numbers(wanted)
    assert len(left) == len(right)
    scale = max((abs(number) for number in right if math.isfinite(number)), default=0.0) or 1.0
    return max((0.0 if one == other or (math.isnan(one) and math.isnan(other)) else abs(one - other) / scale
                for one, other in zip(left, right, strict=True)), default=0.0)


def numbers(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [float(value)] if isinstance(value, (bool, int, float)) else [float(hash(value))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_gives_with_djinn_run_what_it_gives_on_the_cpu(script: Path, tmp_path: Path, address: str) -> None:
    assert "djinn" not in script.read_text()
    wanted, _ = run(str(script), folder=tmp_path)
    assert wanted.pop("device") == "cpu"
    tolerance = wanted.pop("tolerance", TOLERANCE)
    row: dict[str, Any] = {"script": script.stem}
    for where, options in (("in_process", ()), ("served", ("--server", address))):
        got, errors = run(*DJINN, *options, str(script), folder=tmp_path)
        device = got.pop("device")
        got.pop("tolerance", None)
        reported = _REPORT.search(errors)
        assert reported, errors[-4000:]
        assert (reported[2] == address) is (where == "served")
        row[where] = {"difference": difference(got, wanted), "operations": int(reported[1].replace(",", "")),
                      "round_trips": int(reported[3].replace(",", ""))}
        assert device.startswith("remote_accelerator"), device
        assert row[where]["difference"] <= tolerance, (got, wanted)
    if results := os.environ.get("DJINN_LIBRARY_RESULTS"):
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def test_differences_are_seen() -> None:
    assert difference({"a": [1.0, 2.0], "b": "same"}, {"a": [1.0, 2.0], "b": "same"}) == 0
    assert difference({"a": [1.0, 2.0]}, {"a": [1.0, 4.0]}) == 0.5
    assert difference({"a": "x"}, {"a": "y"}) > TOLERANCE
    with pytest.raises(AssertionError):
        difference({"a": [1.0]}, {"a": [1.0, 2.0]})
