"""What a worker does when its device is lost: who is told what, and that the process ends."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from djinn.errors import DeviceLostError, TransportError
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Forget, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.server.loss import DeviceLoss

REASON = "CUDA error: device-side assert triggered"
FIRST, SECOND = "first", "second"


class Fragile(CpuExecutor):
    reason = ""

    def loss(self) -> str:
        return self.reason


class Worker:
    """What a worker with such a device has done."""

    def __init__(self) -> None:
        self.device = Fragile()
        self.done: list[object] = []
        self.loss = DeviceLoss(self.device, lambda: self.done.append("ended"))

    def check(self, session: str) -> bool:
        return self.loss.check(session, self.done.append, self.done.append)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_as_long_as_the_device_works_nothing_happens(worker: Worker) -> None:
    assert not worker.check(FIRST)
    assert not worker.loss.is_anothers(FIRST)
    assert worker.done == []


def test_the_session_that_sees_it_first_learns_why_others_lose_their_connection_and_the_process_ends(
    worker: Worker,
) -> None:
    worker.device.reason = REASON
    assert worker.check(FIRST)
    told, others, ended = worker.done
    assert isinstance(told, DeviceLostError)
    assert isinstance(others, TransportError)
    assert REASON in told.summary
    assert REASON in others.summary
    assert "another session" in others.summary
    assert ended == "ended"


def test_a_session_that_sees_it_later_is_not_blamed(worker: Worker) -> None:
    worker.device.reason = REASON
    assert worker.check(FIRST)
    worker.done.clear()
    assert worker.loss.is_anothers(SECOND)
    assert not worker.loss.is_anothers(FIRST)
    assert worker.check(SECOND)
    [told] = worker.done
    assert isinstance(told, TransportError)


def test_an_executor_that_cannot_lose_its_device_is_not_asked() -> None:
    assert not DeviceLoss(CpuExecutor(), None).is_anothers(FIRST)


def test_operators_that_may_have_failed_are_those_since_the_last_value_and_a_forgotten_program_is_freed() -> None:
    facts = facts_of(torch.ops.aten.take.default)
    take = Program((Template(facts.name, facts.digest, (TensorArgument(), TensorArgument())),),
                   (Step(0, (-1, -2), 1),), 2, (0,))
    service, index = SessionService(CpuExecutor()), torch.zeros(1, dtype=torch.int64)
    service.handle(Batch([Define(1, take), Upload(1, header_of(index)), Upload(2, header_of(index))]), [index, index])
    service.handle(Batch([Run(1, (1, 2), [], (3,))]), [])
    assert service.suspects() == ["aten::take"]
    service.handle(Batch(fetch=(3,)), [])
    assert not service.suspects()
    service.handle(Batch([Run(1, (1, 2), [], (4,))]), [])
    (known,) = map(weakref.ref, service._runs.unconfirmed.values())
    service.handle(Batch([Forget((1,))]), [])
    gc.collect()
    assert known() is None, "a session that never asks for a value would keep all programs that it has ever run"
