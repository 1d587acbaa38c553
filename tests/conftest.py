"""All tests look as thoroughly as the conformance suites do: ``HYPOTHESIS_PROFILE`` says how, if it is set."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.processes import warm
from support.processes.examples import prepare
from support.servers.fixtures import *  # noqa: F403  # fixtures of all rooms

from djinn_conformance.discovery import remember_distributions
from djinn_conformance.laws import active_profile
from djinn_conformance.seeding import without_stacks
from djinn_conformance.serving import Servers
from djinn_conformance.workers import Pool

# Programs that tests start import the package `support`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])

if os.environ.get("HYPOTHESIS_PROFILE"):
    settings.register_profile("chosen", active_profile())
    settings.load_profile("chosen")

Servers.start_process = staticmethod(warm.start_server)
Pool.start_process = staticmethod(warm.start_worker)
without_stacks()
remember_distributions()


def pytest_configure(config: pytest.Config) -> None:
    """Start what tests fork; it imports while this process collects."""
    if _shares(config):
        warm.begin()


def _shares(config: pytest.Config) -> bool:
    # Where processor time is measured, each process starts its own, and its time counts for the file that uses it.
    return bool(getattr(config.option, "forks", 0)) and getattr(config.option, "processor_time", None) is None


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: the collector need not look through it again and again, for a tenth of the time."""
    if _shares(session.config):
        warm.share()
        prepare()
    gc.collect()
    gc.freeze()
    # Tests make many objects that live for one example; collecting a tenth as often saves 3 % of all processor time.
    gc.set_threshold(20_000, 20, 20)


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution that brings one plugin, and make it importable here.

    ``install(plugin, code, distribution=..., version=..., module=...)`` gives the folder to put on a path.
    """
    known = set(sys.modules)

    def make(
        plugin: str, code: str, *, distribution: str = "", version: str = "1.2.3", module: str = "",
    ) -> Path:
        module = module or plugin.replace("-", "_")
        distribution = distribution or plugin
        folder = tmp_path / distribution
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[djinn]\n{plugin} = {module}\n")
        (folder / f"{module}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
