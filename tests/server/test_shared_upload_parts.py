"""Uploads that workers share: both ends, and what each must not trust the other with."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch

from djinn.wire.tensors import header_of
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.memory.kept_memory import KeptBytes
from djinn_plugins.server import shared_uploads
from djinn_plugins.server.control_channel import AwaitedControl
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.shared_uploads import MIN_SHARED_BYTES, GatewayUploads, WorkerUploads
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.upload_messages import (
    DropUpload,
    FindUpload,
    MakeUpload,
    SealUpload,
    UploadReply,
    UploadRequest,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")
SIZE = MIN_SHARED_BYTES // 4
LAB = Tenant("a", share="lab")


class AtOnce(Tasks):
    """Runs a task that waits for nothing."""

    def spawn(self, function: Callable[..., Any], *args: Any) -> None:
        with suppress(StopIteration):
            function(*args).send(None)


class Worker(AwaitedControl):
    """A worker without a process: its requests reach the gateway at once, and the replies come back at once."""

    present: ClassVar[list[Worker]] = []

    def __init__(self, gateway: GatewayUploads, tenant: Tenant = LAB, **options: Any) -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        super().__init__(ours)
        self.present.append(self)
        self.gateway, self.tenant = gateway, tenant
        self.asked: list[UploadRequest] = []
        self.before: Callable[[UploadRequest], None] = lambda request: None
        self.uploads = WorkerUploads(self.tell, **options)

    def tell(self, request: UploadRequest) -> None:
        self.before(request)
        self.asked.append(request)
        self.gateway.answer(request, self, self.tenant)

    async def send(self, message: Any, descriptor: int | None = None, timeout_s: float = 0.0) -> None:
        # A socket would carry a copy.
        self.uploads.answered(message, None if descriptor is None else os.dup(descriptor))

    def store(self, tensor: torch.Tensor, *, is_public: bool = False) -> KeptBytes | None:
        header = header_of(tensor)
        return self.uploads.store(header, tensor, mark_of(header, tensor), is_public=is_public)

    def kinds(self) -> list[type]:
        return [type(request) for request in self.asked]


@pytest.fixture
def gateway() -> Iterator[GatewayUploads]:
    yield GatewayUploads(2**30, AtOnce())
    for worker in Worker.present:
        worker.gateway.leave(worker)
        worker.close()
    Worker.present.clear()


def content(number: float = 1) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


def file_of(stored: KeptBytes | None) -> int:
    assert stored is not None
    return os.fstat(stored.descriptor).st_ino


def without_drops(worker: Worker) -> list[type]:
    """Name its requests, but for those that a thread sends when memory is collected."""
    return [kind for kind in worker.kinds() if kind is not DropUpload]


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        gc.collect()
        time.sleep(0.01)


def test_equal_uploads_of_workers_are_one_file_that_nobody_can_write(gateway: GatewayUploads) -> None:
    first, second = Worker(gateway), Worker(gateway)
    tensor = content()
    one, two = first.store(tensor), second.store(tensor.clone())
    assert file_of(one) == file_of(two)
    for stored in (one, two):
        assert stored is not None
        assert torch.equal(stored.mapped(header_of(tensor)), tensor)
        for write in (lambda: os.pwrite(stored.descriptor, b"x", 0), lambda: os.ftruncate(stored.descriptor, 0),  # noqa: B023  # called at once
                      lambda: mmap.mmap(stored.descriptor, 4096),  # noqa: B023
                      lambda: fcntl.fcntl(stored.descriptor, fcntl.F_ADD_SEALS, 0)):  # noqa: B023
            with pytest.raises(PermissionError):
                write()
    assert without_drops(first) == [FindUpload, MakeUpload, SealUpload, FindUpload]
    assert second.kinds() == [FindUpload]


def test_uploads_whose_marks_are_equal_are_compared(gateway: GatewayUploads) -> None:
    first, second = content(), content()
    second[SIZE // 2 + 100] = 2
    assert mark_of(header_of(first), first) == mark_of(header_of(second), second)
    workers = Worker(gateway), Worker(gateway)
    stored = [worker.store(tensor) for worker in workers for tensor in (first, second)]
    assert file_of(stored[0]) == file_of(stored[2]) != file_of(stored[1]) == file_of(stored[3])
    assert stored[1] is not None
    assert torch.equal(stored[1].mapped(header_of(second)), second)


def test_only_tenants_of_a_group_find_each_others_uploads_and_all_find_public_ones(gateway: GatewayUploads) -> None:
    tensor = content()
    workers = [Worker(gateway, Tenant(str(number), share=group)) for number, group in enumerate(("lab", "office", ""))]
    in_lab, in_office, alone = [worker.store(tensor) for worker in workers]
    assert file_of(in_lab) != file_of(in_office)
    assert alone is None
    public = [worker.store(tensor, is_public=True) for worker in workers]
    assert len(set(map(file_of, public))) == 1


def test_a_worker_whose_tenant_is_in_no_group_does_not_ask_each_time(
        gateway: GatewayUploads, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(gateway, Tenant("a"))
    assert [worker.store(content(number)) for number in range(3)] == [None] * 3
    assert worker.kinds() == [FindUpload]
    worker.tenant = LAB
    monkeypatch.setattr(shared_uploads.time, "monotonic", lambda: time.perf_counter() + 1e9)
    assert worker.store(content()) is not None


def test_small_uploads_are_not_shared(gateway: GatewayUploads) -> None:
    worker = Worker(gateway)
    assert worker.store(content()[:-1].clone()) is None
    assert not worker.asked
    gateway.answer(MakeUpload(1, bytes(16), 4096), worker, LAB)
    assert not gateway.charged_to_others(worker)


def test_two_workers_that_store_the_same_at_the_same_time_hold_it_once(gateway: GatewayUploads) -> None:
    for number, moment in enumerate((MakeUpload, SealUpload)):
        first, second, later = Worker(gateway), Worker(gateway), list[KeptBytes | None]()
        tensor = content(number)

        def while_it_is_written(request: UploadRequest, moment: type = moment, second: Worker = second,
                                tensor: torch.Tensor = tensor, later: list[Any] = later) -> None:
            if isinstance(request, moment):
                later.append(second.store(tensor))

        first.before = while_it_is_written
        assert file_of(first.store(tensor)) == file_of(later[0])


def test_memory_is_freed_with_its_last_user(gateway: GatewayUploads) -> None:
    workers = [Worker(gateway) for _ in range(3)]
    tensor = content()
    stored: list[Any] = [worker.store(tensor) for worker in workers]
    assert [gateway.charged_to_others(worker) for worker in workers] == [
        MIN_SHARED_BYTES - MIN_SHARED_BYTES // 3] * 3
    gateway.leave(workers[0])
    assert gateway.charged_to_others(workers[0]) == 0
    assert gateway.charged_to_others(workers[1]) == MIN_SHARED_BYTES // 2
    mapped = stored[1].mapped(header_of(tensor))
    stored[1] = None
    gc.collect()
    assert DropUpload not in workers[1].kinds(), "a value still uses it"
    del mapped
    wait_until(lambda: DropUpload in workers[1].kinds())
    assert gateway.charged_to_others(workers[2]) == 0
    stored[2] = None
    wait_until(lambda: DropUpload in workers[2].kinds())
    again = Worker(gateway)
    assert again.store(tensor) is not None
    assert MakeUpload in again.kinds(), "nothing was left of it"


@pytest.mark.usefixtures("gateway")
def test_a_worker_makes_no_more_than_its_limits() -> None:
    narrow = GatewayUploads(2 * MIN_SHARED_BYTES, AtOnce(), limit_files=3)
    first, second, third = (Worker(narrow) for _ in range(3))
    stored: list[Any] = [first.store(content(number)) for number in range(3)]
    assert [each is None for each in stored] == [False, False, True], "too many bytes"
    stored += [second.store(content(number)) for number in (3, 4)]
    assert [each is None for each in stored[3:]] == [False, True], "too many files"
    stored.append(third.store(content(1)))
    assert file_of(stored[-1]) == file_of(stored[1]), "what is there is found"
    few = Worker(narrow, limit_files=1)
    assert few.store(content(1)) is not None


def test_a_file_that_can_still_be_written_is_neither_sealed_nor_found(gateway: GatewayUploads) -> None:
    replies: list[tuple[UploadReply, int | None]] = []

    class Hostile(Worker):
        async def send(self, message: Any, descriptor: int | None = None, timeout_s: float = 0.0) -> None:
            replies.append((message, None if descriptor is None else os.dup(descriptor)))

    hostile, worker = Hostile(gateway), Worker(gateway)
    tensor = content()
    mark = mark_of(header_of(tensor), tensor)
    hostile.tell(MakeUpload(1, mark, MIN_SHARED_BYTES))
    reply, descriptor = replies.pop()
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 2**40)
    with mmap.mmap(descriptor, MIN_SHARED_BYTES) as window:
        hostile.tell(SealUpload(2, reply.upload))
        assert replies.pop()[0].upload == 0
        window[:] = bytes_of_content(tensor)
        assert file_of(worker.store(tensor)) != os.fstat(descriptor).st_ino
    # Others can neither seal nor drop it.
    worker.gateway.answer(SealUpload(3, reply.upload), worker, LAB)
    worker.gateway.answer(DropUpload(reply.upload), worker, LAB)
    hostile.tell(SealUpload(4, reply.upload))
    assert replies.pop()[0].upload == reply.upload
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)


def bytes_of_content(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_a_gateway_that_does_not_answer_costs_no_upload(
        gateway: GatewayUploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_uploads, "ANSWER_TIMEOUT_S", 0.05)
    for number, lost in enumerate((FindUpload, MakeUpload, SealUpload)):
        worker = Worker(gateway)

        async def send(message: Any, descriptor: int | None = None, timeout_s: float = 0.0, *, worker: Worker = worker,
                       lost: type = lost) -> None:
            if not isinstance(worker.asked[-1], lost):
                worker.uploads.answered(message, None if descriptor is None else os.dup(descriptor))

        monkeypatch.setattr(worker, "send", send)
        assert worker.store(content(number)) is None, lost
        assert worker.store(content(-1)) is None or lost is SealUpload
        assert without_drops(worker)[-1] is lost, "it waits once"


def test_a_gateway_that_can_open_no_more_files_shares_nothing_and_lives(
        gateway: GatewayUploads, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(gateway)

    def fails(*arguments: Any) -> int:
        raise OSError(24, "Too many open files")

    for name in ("memfd_create", "ftruncate", "dup"):
        with monkeypatch.context() as patch:
            patch.setattr(shared_uploads.os, name, fails)
            assert worker.store(content()) is None, name
        assert not gateway._uploads
    assert worker.store(content()) is not None
