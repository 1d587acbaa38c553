"""Engines whose programs run elsewhere keep the laws where their nodes are this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.servers.kubernetes import Kubernetes
from support.servers.ray_nodes import RayNodes
from support.servers.slurm import SYSTEMS, slurm_of

from djinn_conformance import specs

_PLUGIN = """
from djinn.hookspecs import hookimpl
from {module} import {factory}


class Here({factory}):
    name = "{name}-here"
    capabilities = ("here",)


@hookimpl
def djinn_register_engines(register):
    register(Here())
"""


def keeps_its_laws(kit: Any, name: str, module: str, factory: str, **environment: str) -> None:
    kit.install(f"{name}-here", f"{name}_here", _PLUGIN.format(name=name, module=module, factory=factory))
    outcome = kit.run(f"--djinn-plugin=engine:{name}-here", **environment)
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    assert outcome.laws[f"{name}-here"] == {law.id: "passed" for law in specs.kind_spec("engine").laws}


@pytest.mark.parametrize("system", SYSTEMS)
def test_slurm_keeps_the_laws_of_engines(system: str, kit: Any, tmp_path: Path) -> None:
    slurm = slurm_of(system, tmp_path / "slurm")
    keeps_its_laws(kit, "slurm", "djinn_plugins.cluster.slurm.engine", "SlurmEngines", PATH=slurm.path)
    assert set(slurm.states()) <= {"COMPLETED", "CANCELLED"}


def test_kubernetes_keeps_the_laws_of_engines(kit: Any, tmp_path: Path) -> None:
    kubernetes = Kubernetes(tmp_path / "kubernetes")
    keeps_its_laws(kit, "kubernetes", "djinn_plugins.cluster.kubernetes.engine", "KubernetesEngines",
                   PATH=kubernetes.path)
    assert kubernetes.objects() == {}


def test_ray_keeps_the_laws_of_engines(kit: Any) -> None:
    pytest.importorskip("ray", reason="needs Ray: python3 -m pip install -c constraints.txt ray")
    with RayNodes() as nodes:
        keeps_its_laws(kit, "ray", "djinn_plugins.cluster.ray.engine", "RayEngines", **nodes.environment)
