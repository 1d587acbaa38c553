"""The engine ``ray`` keeps the laws of engines on a Ray cluster whose nodes are processes of this machine."""

from __future__ import annotations

from typing import Any

import pytest
from djinn_conformance import specs
from support.servers.ray_nodes import RayNodes

pytest.importorskip("ray", reason="needs Ray: python3 -m pip install -c constraints.txt ray")

_PLUGIN = """
from djinn.hookspecs import hookimpl
from djinn_engine_ray.engine import RayEngines


class Here(RayEngines):
    name = "ray-here"
    capabilities = ("here",)


@hookimpl
def djinn_register_engines(register):
    register(Here())
"""


def test_ray_keeps_the_laws_of_engines(kit: Any) -> None:
    kit.install("ray-here", "ray_here", _PLUGIN)
    with RayNodes() as nodes:
        outcome = kit.run("--djinn-plugin=engine:ray-here", **nodes.environment)
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    assert outcome.laws["ray-here"] == {law.id: "passed" for law in specs.kind_spec("engine").laws}
