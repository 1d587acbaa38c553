"""pyproject.toml, README.md and the folders say the same, and the wheel carries all of it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMAND = "python3 -m pip install -c constraints.txt nox && python3 -m nox"


def test_each_package_with_hooks_is_an_entry_point_and_the_other_way_round() -> None:
    packages = {".".join(path.parent.relative_to(ROOT / "plugins").parts)
                for path in (ROOT / "plugins").rglob("__init__.py") if "@hookimpl" in path.read_text()}
    # What `torch.compile` loads has no hooks.
    wanted = {*packages, "djinn_plugins.device.dynamo"}
    assert sorted(PROJECT["project"]["entry-points"]["djinn"].values()) == sorted(wanted)


def test_what_is_said_of_the_project_fits_a_few_screens() -> None:
    assert len((ROOT / "pyproject.toml").read_text().splitlines()) <= 300


def test_the_readme_has_the_two_commands_and_ci_runs_the_second() -> None:
    consoles = re.findall(r"```console\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert consoles[:2] == ['python3 -m pip install -c constraints.txt ".[demo]" && djinn demo', COMMAND]
    assert (ROOT / ".ci" / "run").read_text().splitlines().count(COMMAND) == 1
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR


def test_every_direct_dependency_is_pinned_for_our_own_environments() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[<>=!~ ;]", requirement)[0] for requirement in wanted} - {"djinn-torch"}
    assert names <= set(pinned)
    assert pinned["torch"] == "2.13.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True,
                   capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_kernel_plugins_kit_and_specs(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    roots = ("djinn", "plugins/djinn_plugins", "conformance/djinn_conformance")
    sources = {path for root in roots for path in (ROOT / root).rglob("*.py")}
    wanted = {os.fspath(path.relative_to(ROOT)).removeprefix("plugins/").removeprefix("conformance/")
              for path in sources}
    wanted |= {f"djinn_conformance/{path.relative_to(ROOT)}" for path in (ROOT / "specs").rglob("*.toml")}
    assert not wanted - names
    assert "djinn/py.typed" in names


def test_the_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"djinn", "djinn_plugins", "djinn_conformance", "djinn_torch-0.1.0.dist-info"}
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_the_wheel_announces_its_plugins_the_program_and_the_kit(wheel: zipfile.ZipFile) -> None:
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(wheel.read("djinn_torch-0.1.0.dist-info/entry_points.txt").decode())
    assert dict(parser["djinn"]) == PROJECT["project"]["entry-points"]["djinn"]
    assert parser["console_scripts"]["djinn"] == "djinn_plugins.start:main"
    assert parser["torch.backends"]["djinn"] == "djinn_plugins.autoload:load"
    assert parser["pytest11"]["djinn-conformance"] == "djinn_conformance.plugin"
