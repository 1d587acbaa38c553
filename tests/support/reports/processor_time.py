"""Measures the processor time of each file of tests, with that of all processes that it starts; on Linux.

``PYTHONPATH=tests pytest -p support.reports.processor_time --processor-time FILE ...`` appends lines of JSON to a file,
also from the processes of pytest-xdist and from forks. ``python tests/support/reports/processor_time.py FILE`` adds
them up. Processes that several files share, such as servers, count for the file that uses them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", type=Path, metavar="FILE", help="Append processor times to this file.")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.processor_time is not None:
        config.pluginmanager.register(_Meter(config.option.processor_time.absolute()))


def of_descendants(process: int) -> float:
    """The seconds that all processes started by this one have taken, ended ones included."""
    parents: dict[int, list[int]] = defaultdict(list)
    taken: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(fields[1])].append(int(folder.name))
        taken[int(folder.name)] = sum(map(int, fields[11:15]))

    def add(parent: int) -> int:
        return sum(taken[child] + add(child) for child in parents[parent])

    waited = os.times()
    return waited.children_user + waited.children_system + add(process) / _TICKS


class _Meter:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = (0.0, 0.0, time.monotonic())

    def _note(self, what: str) -> None:
        """Write down what has been taken since the last note."""
        before = self._at
        self._at = (time.process_time(), of_descendants(os.getpid()), time.monotonic())
        own, others, wall = (now - then for now, then in zip(self._at, before, strict=True))
        with self._file.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps([what, round(own, 3), round(others, 3), round(wall, 3)]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Write down imports and collection; a fork begins from here."""
        self._note("collection")
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._at = (time.process_time(), of_descendants(os.getpid()), time.monotonic())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._note(str(item.path.relative_to(item.config.rootpath)))
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.getoption("forks", 0):  # those have written down all but little
            self._note("end")


@attrs.define
class _Taken:
    """Seconds."""

    own: float = 0.0
    others: float = 0.0
    wall: float = 0.0


def main(file: str) -> None:
    """Print the sums, the largest first."""
    taken: dict[str, _Taken] = defaultdict(_Taken)
    times: Counter[str] = Counter()
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        what, own, others, wall = json.loads(line)
        times[what] += 1
        entry = taken[what]
        entry.own, entry.others, entry.wall = entry.own + own, entry.others + others, entry.wall + wall
    print("processor s  here  in others  wall s  notes")
    for what, entry in sorted(taken.items(), key=lambda named: -(named[1].own + named[1].others)):
        print(f"{entry.own + entry.others:11.1f} {entry.own:5.1f} {entry.others:10.1f} {entry.wall:7.1f} "
              f"{times[what]:6} {what}")
    print(f"{sum(entry.own + entry.others for entry in taken.values()):11.1f} in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
