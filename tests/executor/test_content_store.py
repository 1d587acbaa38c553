"""What a server keeps of its owners' uploads: their bytes, their limits, and nobody else's."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.errors import ProtocolError
from djinn.wire.tensors import header_of
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.memory.kept_memory import KeptMemory
from djinn_plugins.common.memory.upload_digests import MIN_KEPT_BYTES, digest_of, is_worth_keeping
from djinn_plugins.executor.content_store import Contents, ContentStore

KIB = 1024
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
SIZE = 64 * KIB


def content(value: int) -> torch.Tensor:
    """64 KiB of one byte."""
    return torch.full((SIZE,), value, dtype=torch.uint8)


def digest(tensor: torch.Tensor) -> bytes:
    return digest_of(header_of(tensor), tensor)


@given(st.integers(0, 3 * 2**22 + 5), st.data())
@settings(deadline=None, max_examples=40)
def test_one_other_byte_anywhere_is_another_digest(size: int, data: st.DataObject) -> None:
    tensor = torch.arange(max(1, size), dtype=torch.int32).to(torch.uint8)
    before, other = digest(tensor), tensor.clone()
    assert digest(other) == before
    position = data.draw(st.integers(0, len(tensor) - 1))
    other[position] ^= 1
    assert digest(other) != before


def test_another_form_of_the_same_bytes_is_another_content() -> None:
    zeros = [torch.zeros(4, 8), torch.zeros(8, 4), torch.zeros(8, 4).t(), torch.zeros(32, dtype=torch.int32)]
    assert len({digest(tensor) for tensor in zeros}) == len({mark_of(header_of(t), t) for t in zeros}) == 4


def test_a_mark_is_the_same_for_the_same_and_rarely_for_others() -> None:
    made = [torch.randn(256, 256) for _ in range(200)]
    assert len({mark_of(header_of(tensor), tensor) for tensor in made}) == 200
    assert mark_of(header_of(made[0]), made[0]) == mark_of(header_of(made[0]), made[0].clone())
    for size in (1, 63, 64, 65, 1024):
        small = torch.zeros(size, dtype=torch.uint8)
        assert len(mark_of(header_of(small), small)) == 16


def test_small_tensors_are_not_worth_it() -> None:
    assert not is_worth_keeping(header_of(torch.zeros(MIN_KEPT_BYTES - 1, dtype=torch.uint8)))
    assert is_worth_keeping(header_of(torch.zeros(MIN_KEPT_BYTES, dtype=torch.uint8)))
    store = ContentStore(2**20)
    Contents(store, "a").keep(1, torch.zeros(10))
    assert store.size_bytes == 0


def test_what_an_owner_uploaded_is_recalled_by_digest_alone() -> None:
    store = ContentStore(2**20)
    first, second = Contents(store, "a"), Contents(store, "a")
    first.keep(1, content(1))
    assert second.marks() == [mark_of(header_of(content(1)), content(1))]
    assert second.digests() == [digest(content(1))]
    assert torch.equal(second.recall(7, digest(content(1))), content(1))


def test_nobody_recalls_what_another_owner_uploaded() -> None:
    store = ContentStore(2**20)
    owner, stranger = Contents(store, "a"), Contents(store, "b")
    owner.keep(1, content(1))
    owner.digests()
    assert stranger.marks() == stranger.digests() == []
    with pytest.raises(ProtocolError, match="No content of that digest"):
        stranger.recall(1, digest(content(1)))
    assert store.count("a") == 1
    assert store.count("b") == 0


def test_a_session_recalls_only_what_it_was_told_of() -> None:
    store = ContentStore(2**20)
    contents = Contents(store, "a")
    contents.keep(1, content(1))
    with pytest.raises(ProtocolError):
        contents.recall(2, digest(content(1)))


def test_what_was_told_stays_for_the_session_and_goes_after_it() -> None:
    store = ContentStore(4 * SIZE)
    first = Contents(store, "a")
    first.keep(1, content(1))
    first.close()
    reader, writer = Contents(store, "a"), Contents(store, "b")
    assert reader.digests() == [digest(content(1))]
    for handle in range(10):
        writer.keep(handle, content(10 + handle))
    assert torch.equal(reader.recall(5, digest(content(1))), content(1))
    reader.close()
    writer.close()
    last = Contents(store, "c")
    for handle in range(4):
        last.keep(handle, content(handle))
    assert store.count("a") == store.count("b") == 0
    assert store.count("c") == 4


def test_the_least_recently_used_goes_first_and_the_limit_holds() -> None:
    store = ContentStore(3 * SIZE)
    contents = Contents(store, "a")
    for handle in range(1, 4):
        contents.keep(handle, content(handle))
    contents.release((2, 1, 3))
    contents.keep(4, content(4))
    assert store.size_bytes == 3 * SIZE
    assert set(contents.marks()) == {mark_of(header_of(content(value)), content(value)) for value in (1, 3, 4)}


def test_what_is_held_is_never_pushed_out() -> None:
    store = ContentStore(2 * SIZE)
    contents = Contents(store, "a")
    for handle in range(1, 6):
        contents.keep(handle, content(handle))
    assert store.size_bytes == 2 * SIZE
    assert set(contents.digests()) == {digest(content(1)), digest(content(2))}


@pytest.mark.parametrize("limit", [0, SIZE - 1])
def test_what_does_not_fit_is_not_kept(limit: int) -> None:
    store = ContentStore(limit)
    Contents(store, "a").keep(1, content(1))
    assert store.size_bytes == store.count("a") == 0


def test_equal_uploads_of_an_owner_are_kept_once_and_others_apart() -> None:
    store = ContentStore(2**20)
    sessions = [Contents(store, owner) for owner in "aab"]
    for contents in sessions:
        contents.keep(1, content(9))
    assert (store.count("a"), store.count("b"), store.size_bytes) == (1, 1, 2 * SIZE)
    assert sessions[0].digests() == sessions[0].digests() == [digest(content(9))]
    sessions[0].close()
    assert torch.equal(sessions[1].kept(1), content(9))
    sessions[1].close()
    sessions[2].close()
    assert store.drop_spare() == 2 * SIZE


@linux
def test_uploads_that_only_look_alike_are_kept_apart() -> None:
    first, second = content(1), content(1)
    second[SIZE // 2 + 100] = 2
    assert mark_of(header_of(first), first) == mark_of(header_of(second), second)
    contents = Contents(ContentStore(2**20, memory=KeptMemory()), "a")
    contents.keep(1, first)
    contents.keep(2, second)
    assert torch.equal(contents.shared(1), first)
    assert torch.equal(contents.shared(2), second)


@linux
def test_what_is_shared_is_written_apart_and_its_memory_freed_with_its_last_user() -> None:
    memory = KeptMemory()
    store = ContentStore(SIZE, memory=memory)
    contents, expected = Contents(store, "a"), torch.arange(SIZE // 4, dtype=torch.int32).reshape(128, -1).t()
    contents.keep(1, expected.clone())
    first, second = contents.shared(1), contents.shared(1)
    assert first.stride() == expected.stride()
    first.add_(1)
    assert torch.equal(second, expected)
    assert torch.equal(contents.kept(1), expected)
    contents.release((1,))
    contents.keep(2, content(7))
    assert store.size_bytes == SIZE, "the first one was dropped"
    assert torch.equal(second, expected)
    assert torch.equal(first, expected + 1)
    assert blocks_of(memory) == 2 * SIZE
    del first, second
    gc.collect()
    assert blocks_of(memory) == SIZE
    assert contents.shared(1) is None


def blocks_of(memory: KeptMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


def test_a_handle_that_is_used_again_lets_go_of_what_it_held() -> None:
    store = ContentStore(SIZE)
    contents = Contents(store, "a")
    contents.keep(1, content(1))
    contents.keep(1, content(2))
    assert contents.digests() == [digest(content(2))]


@given(st.lists(st.tuples(st.sampled_from("krdmcR"), st.integers(0, 5), st.integers(0, 3)), max_size=60))
@settings(deadline=None, max_examples=200)
def test_the_books_balance_whatever_sessions_do(actions: list[tuple[str, int, int]]) -> None:
    limit = 4 * SIZE
    store = ContentStore(limit)
    sessions = [Contents(store, owner) for owner in "aab"]
    told: list[list[bytes]] = [[], [], []]
    for action, value, which in actions:
        contents = sessions[which % 3]
        if action == "k":
            contents.keep(value, content(value))
        elif action == "r":
            contents.release((value,))
        elif action == "d":
            told[which % 3] = contents.digests()
        elif action == "m":
            contents.marks()
        elif action == "c":
            contents.close()
            told[which % 3] = []
        elif told[which % 3]:
            known = told[which % 3][value % len(told[which % 3])]
            assert digest(contents.recall(value, known)) == known
        assert store.size_bytes <= limit
        assert store.size_bytes == SIZE * (store.count("a") + store.count("b"))
    for contents in sessions:
        contents.close()
    last = Contents(store, "c")
    for handle in range(4):
        last.keep(handle, content(handle))
    assert store.count("c") == 4, "something is held for ever"


def test_sessions_in_threads_do_not_disturb_each_other() -> None:
    store = ContentStore(6 * SIZE)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(60):
                contents = Contents(store, "a" if seed % 2 else "b")
                contents.keep(1, content((seed + turn) % 7))
                for known in contents.digests():
                    assert digest(contents.recall(2, known)) == known
                contents.close()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.size_bytes == SIZE * (store.count("a") + store.count("b")) <= 6 * SIZE
