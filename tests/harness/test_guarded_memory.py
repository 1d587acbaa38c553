"""Memory in which each way of reaching beyond a block is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.operators import fuzzer

pytestmark = pytest.mark.skipif(bool(fuzzer.obstacle()), reason=fuzzer.obstacle())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    library = fuzzer.build(tmp_path_factory.mktemp("guarded"))
    done = subprocess.run(
        [sys.executable, "-m", "support.operators.guarded_cases"], capture_output=True, text=True, check=True,
        env={**os.environ, **fuzzer.environment(library)})
    return {name: (status, text) for name, (status, text) in json.loads(done.stdout.splitlines()[-1]).items()}


def test_what_is_right_runs(found: dict[str, tuple[int, str]]) -> None:
    assert found.pop("right") == (0, "ended without a signal")
    assert set(found) == {"read beyond", "write beyond", "read before", "write beside", "write before",
                          "write into slack", "freed", "expanded", "malloc", "too long"}


@pytest.mark.parametrize(("case", "text"), [
    ("read beyond", "read 1 bytes beyond a block of 12"),
    ("write beyond", "write 1 bytes beyond a block of 12"),
    ("read before", "read 1 bytes before a block of 12"),
    ("write beside", "write beside a block"),
    ("write before", "write beside a block"),
    ("freed", "read inside a block of 12, freed"),
    ("expanded", "read 1 bytes beyond a block of 4"),
    ("malloc", "read 1 bytes beyond a block of 16"),
    ("too long", "SIGPROF"),
])
def test_reaching_beyond_is_noticed(found: dict[str, tuple[int, str]], case: str, text: str) -> None:
    status, said = found[case]
    assert status != 0
    assert said == text


def test_a_write_into_slack_is_noticed_when_the_block_is_freed(found: dict[str, tuple[int, str]]) -> None:
    status, said = found["write into slack"]
    assert (status, said) == (1, "write beside a block")
