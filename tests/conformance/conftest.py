"""Running the conformance kit in a process of its own, as the author of a plugin does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest
from support.processes.warm import run_pytest

from djinn_conformance import specs

BROKEN = Path(__file__).parent / "broken"
_TIMEOUT_S = 280


@attrs.frozen
class Outcome:
    """What a run of the kit gave."""

    status: int
    output: str
    laws: Mapping[str, Mapping[str, str]]
    """By the subject's name: for each law, ``passed``, ``failed`` or ``skipped``."""

    def failed(self, subject: str) -> set[str]:
        return {law for law, verdict in self.laws[subject].items() if verdict == "failed"}


@attrs.frozen
class Kit:
    """An installation of djinn with small distributions of the test's own beside it."""

    folder: Path

    def install(self, plugin: str, module: str, code: str, *, distribution: str = "") -> None:
        """Install a distribution that brings one plugin, by a real entry point."""
        distribution = distribution or plugin
        site = self.folder / "site"
        metadata = site / f"{distribution.replace('-', '_')}-0.0.1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.0.1\n")
        (metadata / "entry_points.txt").write_text(f"[djinn]\n{plugin} = {module}\n")
        (site / f"{module}.py").write_text(code)

    def install_broken(self, kind: str) -> str:
        """Install the broken plugins of a kind and name their entry point."""
        self.install(f"broken-{kind}", f"broken_{kind}", (BROKEN / f"broken_{kind}.py").read_text())
        return f"broken-{kind}"

    def run(self, *arguments: str, package: Path | None = None, profile: str = "smoke", **environment: str) -> Outcome:
        """Run the kit from an empty folder; Python's own tracebacks of what fails take no time to make."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        paths = [str(package)] if package else []
        paths.append(str(self.folder / "site"))
        output = self.folder / "output"
        status = run_pytest(
            ["-q", "-p", "no:cacheprovider", "--tb=native", "--pyargs", "djinn_conformance", f"--junitxml={report}",
             *arguments],
            folder=empty, output=output, timeout_s=_TIMEOUT_S, has_kit=package is None, environment={
                **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HYPOTHESIS_PROFILE": profile, "DJINN_SERVER": "",
                **environment})
        return Outcome(status, output.read_text(), _read(report) if report.exists() else {})


def _read(report: Path) -> dict[str, dict[str, str]]:
    laws: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        inside = case.attrib["name"].partition("[")[2].rstrip("]")
        subject, law = _split(inside)
        verdict = next((word for word, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",)))
                        if any(case.find(tag) is not None for tag in tags)), "passed")
        seen = laws.setdefault(subject, {})
        seen[law] = verdict if seen.get(law) != "failed" else "failed"
    return laws


def _split(inside: str) -> tuple[str, str]:
    """Take ``plugin:name@device-kind.law`` apart; other parameters of a test stand before or behind it."""
    for kind in specs.suites():
        head, found, tail = inside.rpartition(f"-{kind}.")
        if found:
            subject = head[head.rindex(f"broken-{kind}:"):] if f"broken-{kind}:" in head else head
            return subject.partition(":")[2].partition("@")[0], f"{kind}.{tail.partition('-')[0]}"
    raise ValueError(f"no law in {inside!r}")


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture
def copied_package(tmp_path: Path) -> Callable[[], Path]:
    """Copy the kit and its specifications, as a wheel lays them out, to be tampered with."""

    def copy() -> Path:
        import djinn_conformance
        from djinn_conformance import specs

        target = tmp_path / "tampered"
        shutil.copytree(Path(djinn_conformance.__file__).parent, target / "djinn_conformance",
                        ignore=shutil.ignore_patterns("specs"))
        shutil.copytree(str(specs.folder()), target / "djinn_conformance" / "specs")
        return target

    return copy
