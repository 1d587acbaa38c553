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
PACKAGES = sorted(path.name for path in (ROOT / "plugins").glob("djinn_*") if path.is_dir())
NO_PLUGINS = {"djinn_plugins.cli"}
"""The command line; libraries are no plugins either."""
LIBRARIES = [name for name in PACKAGES if name.startswith("djinn_lib_")]
FOLDERS = [name for name in PACKAGES if name not in {*NO_PLUGINS, *LIBRARIES}]
COMMAND = "python3 -m pip install -c constraints.txt nox && python3 -m nox"


def test_every_folder_of_plugins_is_an_entry_point_and_the_other_way_round() -> None:
    entry_points = PROJECT["project"]["entry-points"]["djinn"]
    assert entry_points == {folder.replace("_", "-"): folder for folder in FOLDERS}


def test_the_import_contracts_know_every_package() -> None:
    linter = PROJECT["tool"]["importlinter"]
    contracts = {contract["id"]: contract for contract in linter["contracts"]}
    assert sorted(linter["root_packages"]) == sorted(["djinn", "djinn_conformance", *PACKAGES])
    assert sorted(contracts["kernel"]["forbidden_modules"]) == sorted(["djinn_conformance", *PACKAGES])
    assert sorted(contracts["plugins"]["modules"]) == FOLDERS
    assert sorted(contracts["conformance"]["forbidden_modules"]) == FOLDERS
    assert sorted(contracts["libraries-plugins"]["source_modules"]) == LIBRARIES
    assert sorted(contracts["libraries-plugins"]["forbidden_modules"]) == sorted(
        ["djinn_conformance", *FOLDERS, *NO_PLUGINS])


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
    roots = ("djinn", *(f"plugins/{folder}" for folder in PACKAGES), "conformance/djinn_conformance")
    sources = {path for root in roots for path in (ROOT / root).rglob("*.py")}
    wanted = {os.fspath(path.relative_to(ROOT)).removeprefix("plugins/").removeprefix("conformance/")
              for path in sources}
    wanted |= {f"djinn_conformance/{path.relative_to(ROOT)}" for path in (ROOT / "specs").rglob("*.toml")}
    assert not wanted - names
    assert "djinn/py.typed" in names


def test_the_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"djinn", "djinn_plugins/autoload.py", "djinn_conformance", "djinn_plugins/start.py",
                    "djinn_torch-0.1.0.dist-info",
                    *PACKAGES}
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_the_wheel_announces_its_plugins_the_program_and_the_kit(wheel: zipfile.ZipFile) -> None:
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(wheel.read("djinn_torch-0.1.0.dist-info/entry_points.txt").decode())
    assert set(parser["djinn"]) == {folder.replace("_", "-") for folder in FOLDERS}
    assert parser["console_scripts"]["djinn"] == "djinn_plugins.start:main"
    assert parser["torch.backends"]["djinn"] == "djinn_plugins.autoload:load"
    assert parser["pytest11"]["djinn-conformance"] == "djinn_conformance.plugin"
