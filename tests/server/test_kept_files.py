"""Files of clients that a model store keeps: whole, once, for their tenant, within a limit."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from djinn_plugins.common.operators.stored_models import KeepReply
from djinn_plugins.server.safetensors_store import kept_files
from djinn_plugins.server.safetensors_store.kept_files import FOLDER, KeptFiles

LIMIT = 3000
FILES = [save({"x": torch.full((250,), float(number))}) for number in range(5)]
"""Of about 1,100 bytes."""
DIGESTS = [hashlib.sha256(data).hexdigest() for data in FILES]


def send(kept: KeptFiles, data: bytes, digest: str, writer: str = "one", tenant: str = "a", piece: int = 400
         ) -> KeepReply:
    reply = KeepReply()
    while not (reply.is_stored or reply.problem or reply.wait_s):
        reply = kept.receive(tenant, digest, writer, reply.position, len(data),
                             data[reply.position:reply.position + piece])
    return reply


def content(kept: KeptFiles, digest: str, tenant: str = "a") -> bytes:
    with os.fdopen(kept.open(tenant, digest), "rb") as file:
        return file.read()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).glob("*/*") if path.suffix != ".used")


def test_a_file_is_kept_for_its_tenant_and_found_by_another_server_of_the_folder(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    assert send(kept, FILES[0], DIGESTS[0]).is_stored
    for each in (kept, KeptFiles(tmp_path, LIMIT)):
        assert content(each, DIGESTS[0]) == FILES[0]
        for tenant, digest in (("b", DIGESTS[0]), ("a", DIGESTS[1]), ("a", "../" + DIGESTS[0]), ("a", "")):
            with pytest.raises(LookupError, match="No file"):
                each.open(tenant, digest)
    assert kept.receive("b", DIGESTS[0], "two", 0, len(FILES[0]), b"") == KeepReply(0)
    assert "SHA-256" in kept.receive("a", "../x", "one", 0, 5, b"12345").problem
    assert names(tmp_path) == [DIGESTS[0] + ".part", DIGESTS[0] + ".safetensors"]
    KeptFiles(tmp_path, LIMIT)
    assert len(names(tmp_path)) == 2, "the part is locked"


def test_another_content_or_a_damaged_file_is_not_kept(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    assert "another digest" in send(kept, FILES[0], DIGESTS[1]).problem
    damaged = FILES[0][:-1]
    assert "should have" in send(kept, damaged, hashlib.sha256(damaged).hexdigest()).problem
    assert "--keep" in kept.receive("a", DIGESTS[0], "one", 0, LIMIT + 1, b"").problem
    assert names(tmp_path) == []


def test_a_file_of_torch_save_is_kept(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    torch.save(torch.ones(5), file := io.BytesIO())
    data = file.getvalue()
    assert send(kept, data, digest := hashlib.sha256(data).hexdigest()).is_stored
    assert content(kept, digest) == data


@pytest.mark.parametrize("end", [b"", b"\1"], ids=["truncated", "changed"])
def test_a_kept_file_that_was_changed_is_refused_by_name_and_can_be_sent_again(tmp_path: Path, end: bytes) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    send(kept, FILES[0], DIGESTS[0])
    send(kept, FILES[1], DIGESTS[1])
    [path] = (tmp_path / FOLDER).glob(f"*/{DIGESTS[0]}.safetensors")
    path.write_bytes(FILES[0][:-1] + end)
    with pytest.raises(LookupError, match=f"{path.name} has another content"):
        kept.open("a", DIGESTS[0])
    path.replace(path.with_name(DIGESTS[2] + ".safetensors"))
    with pytest.raises(LookupError, match=DIGESTS[2]):
        kept.open("a", DIGESTS[2])
    assert content(kept, DIGESTS[1]) == FILES[1]
    assert send(kept, FILES[0], DIGESTS[0]).is_stored
    assert content(kept, DIGESTS[0]) == FILES[0]


def test_of_several_writers_one_sends_and_the_next_goes_on_if_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, other_server = KeptFiles(tmp_path, LIMIT), KeptFiles(tmp_path, LIMIT)
    data, size = FILES[0], len(FILES[0])
    assert kept.receive("a", DIGESTS[0], "one", 0, size, data[:100]).position == 100
    waits = kept.receive("a", DIGESTS[0], "two", 0, size, data[:100])
    assert (waits.position, waits.wait_s > 0) == (100, True)
    assert other_server.receive("a", DIGESTS[0], "three", 0, size, data[:100]).wait_s > 0
    monkeypatch.setattr(kept_files, "WRITER_S", 0.0)
    assert send(kept, data, DIGESTS[0], "two").is_stored
    assert kept.receive("a", DIGESTS[0], "one", 100, size, data[100:200]).is_stored
    assert content(other_server, DIGESTS[0]) == data
    assert other_server.receive("a", DIGESTS[0], "three", 0, size, b"").is_stored
    assert names(tmp_path) == [DIGESTS[0] + ".safetensors"]


def test_the_least_recently_used_file_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    for number in (0, 1):
        send(kept, FILES[number], DIGESTS[number])
    for number, used in ((0, 20), (1, 10)):
        [path] = (tmp_path / FOLDER).glob(f"*/{DIGESTS[number]}.used")
        os.utime(path, (used, used))
    opened = kept.open("a", DIGESTS[1])
    os.close(opened)
    assert send(kept, FILES[2], DIGESTS[2]).is_stored
    assert names(tmp_path) == sorted(DIGESTS[number] + ".safetensors" for number in (1, 2))


def use_up(folder: Path, kept: KeptFiles, numbers: tuple[int, ...], tenant: str) -> None:
    """Send files of a tenant, the first of which was used longest ago."""
    for number in numbers:
        assert send(kept, FILES[number], DIGESTS[number], tenant=tenant).is_stored
        for path in folder.glob("*/*/*.used"):
            used = path.stat().st_mtime - 1
            os.utime(path, (used, used))


def test_a_tenant_takes_room_from_those_over_their_parts_and_from_no_others(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, 5 * len(FILES[0]))
    use_up(tmp_path, kept, (0, 1, 2, 3), "many")
    use_up(tmp_path, kept, (0, 1), "few")
    with pytest.raises(LookupError):
        kept.open("many", DIGESTS[0])
    for number in (2, 3, 4):
        # From here on, each has its part: who sends more loses files of its own.
        assert send(kept, FILES[number], DIGESTS[number], tenant="few").is_stored
        assert [content(kept, DIGESTS[each], "many") for each in (2, 3)] == FILES[2:4]
    assert content(kept, DIGESTS[4], "few") == FILES[4]
    assert len(names(tmp_path)) == 5


def test_a_file_larger_than_what_others_leave_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, 3 * len(FILES[0]))
    use_up(tmp_path, kept, (0,), "a")
    large = save({"x": torch.zeros(2 * 250 + 80)})
    assert "equal parts" in kept.receive("b", hashlib.sha256(large).hexdigest(), "two", 0, len(large), b"").problem
    assert content(kept, DIGESTS[0]) == FILES[0]


def test_a_file_larger_than_the_disk_is_refused_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, 0, 0, len(FILES[0]) - 1, *disk[5:])))
    assert send(kept, FILES[0], DIGESTS[0]) == KeepReply(
        problem="The file cannot be kept: the disk has too little room.")
    assert names(tmp_path) == []
    monkeypatch.undo()
    assert send(kept, FILES[0], DIGESTS[0]).is_stored


def test_files_that_never_arrive_keep_no_other_tenant_out(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, LIMIT)
    for number in (0, 1, 2):
        assert kept.receive("slow", DIGESTS[number], "one", 0, 1000, bytes(999)).position == 999
    assert send(kept, FILES[0], DIGESTS[0]).is_stored
    assert content(kept, DIGESTS[0]) == FILES[0]


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.integers(0, 1200), st.integers(0, 700)), max_size=12))
def test_pieces_in_any_order_leave_the_file_or_nothing(pieces: list[tuple[str, int, int]]) -> None:
    with TemporaryDirectory() as folder:
        kept, data = KeptFiles(Path(folder), LIMIT), FILES[0]
        for writer, begin, length in pieces:
            kept.receive("a", DIGESTS[0], writer, begin, len(data), data[begin:begin + length])
        try:
            assert content(kept, DIGESTS[0]) == data
        except LookupError:
            assert not list(Path(folder).glob("*/*/*.safetensors"))
