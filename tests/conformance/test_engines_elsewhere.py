"""Engines whose programs are not processes of this machine keep the laws where stand-ins make them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from djinn_conformance import specs
from support.servers.slurm import Slurm

_PLUGIN = """
from djinn.hookspecs import hookimpl
from djinn_engine_slurm.engine import SlurmEngines


class Here(SlurmEngines):
    name = "slurm-here"
    capabilities = ("here",)


@hookimpl
def djinn_register_engines(register):
    register(Here())
"""


def test_slurm_keeps_the_laws_of_engines(kit: Any, tmp_path: Path) -> None:
    kit.install("slurm-here", "slurm_here", _PLUGIN)
    slurm = Slurm(tmp_path / "slurm")
    outcome = kit.run("--djinn-plugin=engine:slurm-here", PATH=slurm.path)
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    assert outcome.laws["slurm-here"] == {law.id: "passed" for law in specs.kind_spec("engine").laws}
    assert set(slurm.states()) <= {"COMPLETED", "CANCELLED"}
