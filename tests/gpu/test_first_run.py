"""The steps of a first run on a GPU: each has its limit, none ends the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gpu import first_run
from gpu.first_run import STEPS, Step, run


def test_steps_end_in_time_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "LEAST_S", 0.1)
    python = (sys.executable, "-S", "-c")
    found = run([Step("fails", 20, (*python, "print('so far'); raise SystemExit(3)")),
                 Step("stands still", 0.3, (*python, "import time; time.sleep(60)")),
                 Step("goes well", 20, (*python, "print('3 passed')"))], tmp_path / "logs")
    assert found["fails"].startswith("status 3 after")
    assert found["fails"].endswith(": so far")
    assert found["stands still"] == "ended after 0 s"
    assert found["goes well"].endswith(": 3 passed")
    assert (tmp_path / "logs" / "2.log").read_text() == "3 passed\n"
    assert run([Step("late", 20, (*python, ""))], tmp_path, 0.05) == {"late": "no time was left"}


def test_the_steps_name_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    named = [word for step in STEPS for word in step.command if word.startswith("tests/")]
    assert named
    assert [word for word in named if not (root / word).exists()] == []
    assert sum(step.limit_s for step in STEPS[:5]) < first_run.LIMIT_S
