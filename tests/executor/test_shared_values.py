"""Values that sessions share on a device until one writes; on the CPU of a system without files in memory, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.servers.upload_sessions import DOUBLE, SUM, template

from djinn.ir.program import ConstantArgument, NumberArgument, Program, Step, TensorArgument, TorchArgument
from djinn.wire import messages
from djinn.wire.messages import Batch, Copy, Define, Free, Run, Upload, UploadByDigest
from djinn.wire.tensors import header_of
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.guard import CallCheck
from djinn_plugins.common.memory.kept_memory import map_private
from djinn_plugins.common.memory.shared_values import SharedValue, is_shared, unshare
from djinn_plugins.common.memory.tensor_bytes import address_of
from djinn_plugins.common.operators import stored_models
from djinn_plugins.common.operators.stored_models import StoreAnswer, stored_operators
from djinn_plugins.executor.content_store import Contents, ContentStore
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda.executor import CudaExecutor
from djinn_plugins.executor.cuda.overlapping import OverlappingCudaExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.executor.torch.executor import TorchProgram

T, N = TensorArgument(), NumberArgument()
SIZE = 2**15
"""Elements of the smallest upload that is kept, twice."""
SLICE = template(torch.ops.aten.slice.Tensor, T, N, N, N)
ADD = template(torch.ops.aten.add_.Scalar, T, N)
VIEW = Program((SLICE,), (Step(0, (-1,), 1),), 1, (0,))
WRITE_PART = Program((SLICE, ADD), (Step(0, (-1,), 1), Step(1, (0,), 0)), 1, ())
RESIZE = template(torch.ops.aten.resize_.default, T, N)
LOAD = template(stored_operators().tensor, T, ConstantArgument("file"), ConstantArgument("name"), N,
                dtype=TorchArgument("dtype", "float32"))
STORED = torch.arange(SIZE, dtype=torch.float32)
OWNERS = "aab"


class Models:
    """A store whose tensors lie in ordinary memory, as they do on a device."""

    def answer(self, request: str) -> StoreAnswer:
        raise NotImplementedError

    def keep(self, *_: Any) -> Any:
        raise NotImplementedError

    def tensor(self, file: str, name: str) -> torch.Tensor:
        return STORED.clone()


class WatchedCpu(CpuExecutor):
    """Expects that a program finds memory of their own behind the values that it writes."""

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> TorchProgram:
        made = super().compile_checked(program, checks)
        run = made.run_until

        def run_until(stop: Any, inputs: list[Any], *rest: Any) -> list[Any]:
            assert not any(is_shared(inputs[position]) for position in made.effects.written)
            return run(stop, inputs, *rest)

        made.run_until = run_until  # type: ignore[method-assign]  # of this one
        return made


@attrs.define
class Sharing:
    """A session."""

    service: SessionService

    def ask(self, *commands: Any, tensors: tuple[torch.Tensor, ...] = (), fetch: tuple[int, ...] = ()) -> Any:
        result, data = self.service.handle(Batch(list(commands), fetch=fetch, synchronize=True), tensors)
        assert not result.failures, result.failures
        return data or result.items

    def upload(self, handle: int, tensor: torch.Tensor) -> None:
        self.ask(Upload(handle, header_of(tensor)), tensors=(tensor,))

    def recall(self, handle: int, number: int) -> None:
        """Use what the owner has uploaded, if that is so much."""
        [plain] = self.ask(fetch=(messages.DIGESTS_HANDLE,))
        digests = messages.from_wire(plain.value)
        if number < len(digests):
            self.ask(UploadByDigest(handle, digests[number]))

    def value(self, handle: int) -> torch.Tensor:
        found = self.service.memory.values[handle]
        assert isinstance(found, torch.Tensor)
        return found


def opened(executor: Executor, owners: str = OWNERS) -> list[Sharing]:
    """Sessions that keep uploads for their owners, in memory that the system does not share."""
    store, made = ContentStore(2**24), []
    for owner in owners:
        made.append(Sharing(SessionService(executor, travels=True, contents=Contents(store, owner))))
        made[-1].ask(Define(1, DOUBLE), Define(2, VIEW), Define(3, WRITE_PART),
                     Define(4, Program((LOAD,), (Step(0, (-1,), 1),), 1, (0,))),
                     Define(5, Program((LOAD, ADD), (Step(0, (-1,), 1), Step(1, (0,), 0)), 1, (0,))),
                     Define(6, Program((SUM,), (Step(0, (-1,), 1),), 1, (0,))),
                     Define(7, Program((RESIZE, ADD), (Step(0, (-1,), 0), Step(1, (-1,), 0)), 1, ())),
                     Define(8, Program((LOAD, RESIZE, ADD), (Step(0, (-1,), 1), Step(1, (0,), 0), Step(2, (0,), 0)), 1,
                                       (0,))))
        made[-1].upload(99, torch.zeros(0))
    return made


@pytest.fixture(autouse=True)
def _stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stored_models, "_shared", {})
    stored_models.provide(Models())
    yield
    stored_models.provide(None)


def executors() -> list[Any]:
    without = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    cuda = torch.device("cuda:0")
    return [pytest.param(WatchedCpu, id="cpu"), pytest.param(lambda: CudaExecutor(cuda), id="cuda", marks=without),
            pytest.param(lambda: OverlappingCudaExecutor(cuda), id="overlapping", marks=without)]


everywhere = pytest.mark.parametrize("opening", executors())


def contents() -> list[torch.Tensor]:
    ones = torch.ones(SIZE)
    almost = ones.clone()
    almost[SIZE // 2 + 100] = 2
    return [ones, almost, torch.randn(2, SIZE // 2, generator=torch.Generator().manual_seed(1)).t()]


HANDLES = st.integers(1, 2)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["upload", "recall"]), HANDLES, st.integers(0, 2)),
    st.tuples(st.just("load"), HANDLES),
    st.tuples(st.just("load and write"), HANDLES),
    st.tuples(st.just("load and resize"), HANDLES),
    st.tuples(st.just("resize"), HANDLES, st.sampled_from([100, 2 * SIZE])),
    st.tuples(st.just("view"), HANDLES, HANDLES),
    st.tuples(st.just("copy"), HANDLES, HANDLES),
    st.tuples(st.just("double"), HANDLES),
    st.tuples(st.just("write"), HANDLES, st.integers(0, 500), st.integers(1, 500)),
    st.tuples(st.just("read"), HANDLES),
    st.tuples(st.just("free"), HANDLES))


def step(session: Sharing, values: dict[int, torch.Tensor], what: str, handle: int, *details: int) -> None:
    """Do one thing in a session, and the same in eager PyTorch."""
    uploads = contents()
    if what == "upload":
        session.upload(handle, uploads[details[0]].clone())
        values[handle] = uploads[details[0]].clone()
    elif what == "recall":
        before = session.service.memory.values.get(handle)
        session.recall(handle, details[0])
        if session.service.memory.values.get(handle) is not before:
            values[handle] = session.ask(fetch=(handle,))[0].clone()
            assert any(torch.equal(values[handle], upload) for upload in uploads)
    elif what == "load":
        session.ask(Run(4, (99,), [[SIZE]], (handle,)))
        values[handle] = STORED.clone()
    elif what == "load and write":
        session.ask(Run(5, (99,), [[SIZE], 1.0], (handle,)))
        values[handle] = STORED + 1
    elif what == "load and resize":
        session.ask(Run(8, (99,), [[SIZE], [2 * SIZE], 1.0], (handle,)))
        # What is new has any content.
        session.ask(Run(7, (handle,), [[SIZE], 0.0], ()))
        values[handle] = STORED + 1
    elif handle not in values:
        return
    elif what == "resize" and details[0] < values[handle].numel():
        session.ask(Run(7, (handle,), [details, 1.0], ()))
        values[handle].resize_(details).add_(1)
    elif what == "resize":
        session.ask(Run(7, (handle,), [details, 1.0], ()), Free((handle,)))
        del values[handle]
    elif what == "view":
        session.ask(Run(2, (handle,), [0, 0, 700], (details[0],)))
        values[details[0]] = values[handle][:700]
    elif what == "copy":
        session.ask(Copy(((handle, details[0], 0),)))
        values[details[0]] = values[handle].clone()
    elif what == "double":
        session.ask(Run(1, (handle,), [2.0], ()))
        values[handle] *= 2
    elif what == "write":
        begin, length = details
        session.ask(Run(3, (handle,), [0, begin, begin + length, 1.0], ()))
        values[handle][begin:begin + length] += 1
    elif what == "read":
        assert torch.equal(session.ask(fetch=(handle,))[0], values[handle])
    else:
        session.ask(Free((handle,)))
        del values[handle]


@everywhere
@given(st.lists(st.tuples(st.integers(0, len(OWNERS) - 1), STEPS), min_size=10, max_size=25))
def test_no_session_sees_what_another_one_writes(opening: Any, steps: list[tuple[int, Any]]) -> None:
    executor = opening()
    sessions, expected = opened(executor), [dict[int, torch.Tensor]() for _ in OWNERS]
    for number, (what, *details) in steps:
        step(sessions[number], expected[number], what, *details)
        for session, values in zip(sessions, expected, strict=True):
            for handle, value in values.items():
                assert torch.equal(session.value(handle).cpu(), value), (what, handle)
                assert session.value(handle).stride() == value.stride()
    executor.close()


@pytest.fixture(params=[False, True], ids=["alone", "beside a mapped file"])
def _mapped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Whether this process has other values that lie in files, such as stored ones."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1))
    with path.open("rb") as file:
        data = map_private(file.fileno(), 0, 1) if request.param else None
    yield
    del data


@pytest.mark.usefixtures("_mapped")
@everywhere
def test_equal_values_are_in_memory_once_until_one_is_written(opening: Any) -> None:
    executor = opening()
    first, second, third, stranger = sessions = opened(executor, "aaab")
    upload = contents()[2]
    for session in sessions:
        session.upload(1, upload.clone())
        session.ask(Run(4, (99,), [[SIZE]], (2,)))
    for session in (first, second, third):
        session.recall(3, 0)
        assert torch.equal(session.ask(fetch=(3,))[0], upload)
    uploaded = {address_of(session.value(handle)) for session in (first, second, third) for handle in (1, 3)}
    loaded = {address_of(session.value(2)) for session in sessions}
    assert len(uploaded) == len(loaded) == 1
    assert address_of(stranger.value(1)) not in uploaded, "another owner's"
    for session in sessions:
        # What reads them copies nothing, and what they share is not their own.
        session.ask(Run(6, (1,), [], (50,)), Run(2, (1,), [0, 0, 700], (51,)), Run(6, (2,), [], (52,)))
        assert is_shared(session.value(1))
        assert is_shared(session.value(2))
        assert session.service.held_bytes < 1000
    for written, other in ((1, 3), (2, 1)):
        before = address_of(first.value(written))
        first.ask(Run(1, (written,), [2.0], ()))
        assert address_of(first.value(written)) != before
        assert address_of(first.value(other)) != address_of(first.value(written))
        assert torch.equal(first.value(51), first.value(1)[:700]), "a view follows"
    assert 2 * 4 * SIZE <= first.service.held_bytes < 2 * 4 * SIZE + 1000
    assert {address_of(session.value(handle)) for session in (second, third) for handle in (1, 3)} == uploaded
    # What is written is shared with nobody, and what others still share is.
    first.upload(1, upload.clone())
    assert {address_of(first.value(1))} == uploaded
    executor.close()


@everywhere
def test_the_last_value_that_is_written_keeps_the_memory_and_no_memory_stays(opening: Any) -> None:
    executor = opening()
    first, second = opened(executor, "aa")
    for session in (first, second):
        session.upload(1, contents()[0])
    before = address_of(first.value(1))
    second.ask(Free((1,)))
    first.ask(Run(1, (1,), [2.0], ()))
    assert address_of(first.value(1)) == before
    second.upload(1, contents()[0])
    assert torch.equal(second.value(1).cpu(), contents()[0])
    assert torch.equal(first.value(1).cpu(), contents()[0] * 2)
    executor.close()


def test_a_content_holds_no_memory() -> None:
    shared, device = SharedValue(), torch.device("cpu")
    values: list[torch.Tensor | None] = [shared.share(torch.ones(1000))]
    values += [shared.value(device) for _ in range(100)]
    assert len({address_of(value) for value in values if value is not None}) == 1
    assert shared.value(torch.device("meta")) is None, "the value is on another device"
    unshare(values[-1])
    values[:-1] = []
    gc.collect()
    assert shared.value(device) is None
    assert not shared._storages


@pytest.mark.parametrize("tensor", [torch.zeros(2000)[:1000], torch.frombuffer(bytearray(4000), dtype=torch.float32)],
                         ids=["in a larger storage", "in memory of somebody else"])
def test_some_memory_cannot_be_shared(tensor: torch.Tensor) -> None:
    shared = SharedValue()
    assert shared.share(tensor) is tensor
    assert shared.value(tensor.device) is None
