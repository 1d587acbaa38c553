"""Digests of files are remembered as long as nothing can have changed the file."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from djinn_plugins.common.files.identity import FileIdentity
from djinn_plugins.models import file_digests
from djinn_plugins.models.file_digests import SETTLED_NS, digest_of

CONTENT = b"weights" * 1000
REMEMBERED = Path("djinn", "digests.json")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "caches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if files had been there for long."""
    now_ns = time.time_ns
    monkeypatch.setattr(file_digests, "time_ns", lambda: now_ns() + 2 * SETTLED_NS)


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that were computed."""
    found: list[str] = []
    compute = hashlib.file_digest

    def counting(*given):
        digest = compute(*given)
        found.append(digest.hexdigest())
        return digest

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def keep_times(file: Path, change: Callable[[], object]) -> None:
    before = file.stat()
    change()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.usefixtures("later")
def test_a_file_that_has_not_changed_is_digested_once(file: Path, digested: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"others")
    assert [digest_of(path) for path in (file, other, file, other)] == [sha256(CONTENT), sha256(b"others")] * 2
    assert len(digested) == 2


@pytest.mark.usefixtures("later")
def test_a_file_that_has_changed_is_digested_again_also_if_its_size_and_time_are_as_before(
    file: Path, tmp_path: Path
) -> None:
    changed, renamed = (bytes(reversed(CONTENT)), CONTENT[1:] + CONTENT[:1])
    assert digest_of(file) == sha256(CONTENT)
    keep_times(file, lambda: file.write_bytes(changed))
    assert digest_of(file) == sha256(changed)
    another = tmp_path / "another"
    another.write_bytes(renamed)
    keep_times(file, lambda: another.replace(file))
    assert digest_of(file) == sha256(renamed)


def test_a_file_that_was_just_written_is_not_remembered(file: Path, digested: list[str], caches: Path) -> None:
    assert digest_of(file) == digest_of(file) == sha256(CONTENT)
    assert len(digested) == 2
    assert not caches.exists()


@pytest.mark.usefixtures("later")
def test_a_file_that_changes_while_it_is_digested_is_not_remembered(
    file: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = hashlib.file_digest

    def changing(*given):
        digest = compute(*given)
        file.write_bytes(b"changed")
        return digest

    monkeypatch.setattr(hashlib, "file_digest", changing)
    digest_of(file)
    assert not caches.exists()


@pytest.mark.usefixtures("later")
def test_where_the_file_system_keeps_whole_seconds_nothing_is_remembered(
    file: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = file_digests.identity_of
    monkeypatch.setattr(file_digests, "identity_of", lambda descriptor: FileIdentity(
        *(10**9 if name == "changed_ns" else getattr(of(descriptor), name)
          for name in FileIdentity.__struct_fields__)))
    assert digest_of(file) == sha256(CONTENT)
    assert not caches.exists()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(b"[" * 10**6),
    lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    lambda path: path.write_text(path.read_text().replace(sha256(CONTENT), "0")),
    lambda path: path.chmod(0o666),
], ids=["truncated", "nested", "no text", "no digest", "written by others"])
def test_what_is_remembered_is_ignored_if_it_is_damaged_or_others_can_write_it(
    file: Path, digested: list[str], caches: Path, damage: Callable[[Path], object]
) -> None:
    digest_of(file)
    damage(caches / REMEMBERED)
    assert digest_of(file) == sha256(CONTENT)
    assert len(digested) == 2
    assert (caches / REMEMBERED).stat().st_mode & 0o777 == 0o600
    assert digest_of(file) == sha256(CONTENT)
    assert len(digested) == 2


@pytest.mark.usefixtures("later")
def test_it_works_without_a_folder_for_caches(file: Path, caches: Path) -> None:
    caches.write_text("no folder")
    assert digest_of(file) == digest_of(file) == sha256(CONTENT)


@pytest.mark.usefixtures("later")
def test_the_latest_files_are_remembered(file: Path, digested: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "MAX_FILES", 2)
    paths = [file.with_name(str(number)) for number in range(3)]
    for path in paths:
        path.write_bytes(CONTENT)
        digest_of(path)
    for path in reversed(paths):
        digest_of(path)
    assert len(digested) == 4


def test_the_name_of_a_file_says_nothing_of_its_content(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / sha256(CONTENT)
    blob.parent.mkdir()
    blob.write_bytes(b"edited")
    assert digest_of(blob) == sha256(b"edited")


@pytest.mark.usefixtures("later")
def test_in_a_file_system_in_memory_nothing_is_remembered(caches: Path) -> None:
    memory = Path("/dev/shm")  # a file system in memory
    if not memory.is_dir():
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(dir=memory) as made:
        file = Path(made, "file")
        file.write_bytes(CONTENT)
        assert digest_of(file) == sha256(CONTENT)
    assert not caches.exists()
