"""What was measured is kept for the next session with the same executor, and nothing else is believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest

from djinn_plugins.graph.metadata import MemoryPattern
from djinn_plugins.schedule import profiles
from djinn_plugins.schedule.profiles import Calibration, Identity
from djinn_plugins.schedule.schedule import DeviceProfile, LinkProfile, OperationProfile, Rate, Sample

IDENTITY = Identity("a.machine", "cpu", "2.13.0")
FOUND = Calibration(
    IDENTITY,
    DeviceProfile({MemoryPattern.REUSED: Rate(1e11, 1e10)}, launch_s=3e-6, is_measured=True,
                  operations={"any::op": OperationProfile(1e-6, (Sample(1e6, 2e6, 3e-3),))}),
    LinkProfile(1e-4, 2e9, is_measured=True), LinkProfile(2e-4, 1e9, is_measured=True), 8.5, ("slow: no memory",))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_kept_is_found_again(cache: Path) -> None:
    path = profiles.save(FOUND)
    assert path.is_relative_to(cache / "djinn" / "profiles")
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    assert profiles.load(IDENTITY) == FOUND


def test_each_executor_has_its_own() -> None:
    profiles.save(FOUND)
    for change in ({"host": "b"}, {"torch": "3"}, {"threads": 2}, {"device": "cuda:0"}):
        other = attrs.evolve(IDENTITY, **change)
        assert profiles.load(other) == Calibration(other)
        assert not profiles.load(other).is_measured


def changed(**changes: Any) -> bytes:
    document = json.loads(profiles.path_of(IDENTITY).read_bytes())
    for name, value in changes.items():
        *way, last = name.split("__")
        place = document
        for step in way:
            place = place[step]
        place[last] = value
    return json.dumps(document).encode()


CHANGES: list[dict[str, Any]] = [
    {"form": 2}, {"calibration__of__host": "another"}, {"calibration__profile__rate__bytes_per_s": 0},
    {"calibration__profile__rates__reused__flops_per_s": -1.0}, {"calibration__profile__launch_s": -1},
    {"calibration__profile__launch_s": "soon"}, {"calibration__home_link__bytes_per_s": 0.0},
    {"calibration__profile__operations__any::op__samples": [{"flops": 1, "size_bytes": 1, "seconds": -1}]},
    {"calibration__profile__operations__any::op__launch_s": -1}, {"calibration__feed_link__latency_s": -1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_file_that_makes_no_sense_is_left_aside_with_a_warning(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = profiles.save(FOUND)
    path.write_bytes(changed())
    assert profiles.load(IDENTITY) == FOUND
    path.write_bytes(changed(**change))
    with caplog.at_level(logging.WARNING, "djinn"):
        assert profiles.load(IDENTITY) == Calibration(IDENTITY)
    assert str(path) in caplog.text
    assert "defaults are used" in caplog.text


@pytest.mark.parametrize("content", [
    b"", b"\xff\x00", b"[]", b"{}", b'{"form": 1', b"1" * (profiles.MAX_FILE_BYTES + 9)],
    ids=("empty", "binary", "list", "object", "cut", "long"))
def test_so_is_what_is_no_profile_at_all(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    profiles.save(FOUND).write_bytes(content)
    with caplog.at_level(logging.WARNING, "djinn"):
        assert not profiles.load(IDENTITY).is_measured
    assert "is no profile" in caplog.text


def test_what_cannot_be_read_is_told(caplog: pytest.LogCaptureFixture) -> None:
    profiles.path_of(IDENTITY).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "djinn"):
        assert not profiles.load(IDENTITY).is_measured
    assert "cannot be read" in caplog.text


def test_a_failed_write_leaves_the_file_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    path = profiles.save(FOUND)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        profiles.save(attrs.evolve(FOUND, seconds=1.0))
    monkeypatch.undo()
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_texts_say_whether_it_was_measured() -> None:
    assert "measured" in str(FOUND).splitlines()[0]
    assert "left out: slow: no memory" in str(FOUND)
    assert "defaults, not measured" in str(Calibration(IDENTITY))
