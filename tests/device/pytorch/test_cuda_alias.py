"""``cuda`` as a name of the remote device: where programs name it, and what is left when it is no name any more."""

from __future__ import annotations

import importlib.util
import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _device

from djinn.record.tensor import LazyTensor
from djinn_plugins.run.cuda.alias import cuda_alias

PLACES = {name: code for name, _, code in (line.strip().partition(": ") for line in """
    factory: torch.ones(2, device="cuda")
    factory, index: torch.ones(2, device="cuda:0")
    factory, integer: torch.ones(2, device=0)
    factory, object: torch.ones(2, device=torch.device("cuda"))
    empty: torch.empty(2, device="cuda").fill_(1)
    full: torch.full((2,), 1.0, device="cuda")
    arange: torch.arange(1, 3, 1, device="cuda") * 0 + 1.0
    normal: torch.normal(1.0, 0.0, (2,), device="cuda")
    eye: torch.eye(2, device="cuda").sum(0)
    indices: torch.tril_indices(1, 1, device="cuda").flatten() + 1.0
    window: torch.hann_window(3, device="cuda", periodic=False)[1].expand(2)
    frequencies: torch.fft.fftfreq(2, device="cuda") * 0 + 1
    tensor: torch.tensor([1.0, 1.0], device="cuda")
    as_tensor: torch.as_tensor([1.0, 1.0], device="cuda")
    asarray: torch.asarray([1.0, 1.0], device="cuda")
    to: torch.ones(2).to("cuda")
    to, keyword: torch.ones(2).to(device="cuda:0", non_blocking=True)
    to, object and dtype: torch.ones(2).double().to(torch.device("cuda", 0), torch.float32)
    cuda: torch.ones(2).cuda()
    cuda, index: torch.ones(2).cuda(0, non_blocking=True)
    cuda, object: torch.ones(2).cuda(torch.device("cuda"))
    twice: torch.ones(2).cuda().to("cuda").cuda()
    like: torch.ones_like(torch.zeros(2), device="cuda")
    like, remote: torch.ones_like(torch.zeros(2, device="cuda"), device="cuda")
    like, random: torch.rand_like(torch.zeros(2), device="cuda") * 0 + 1
    new: torch.zeros(1).new_ones(2, device="cuda")
    new, remote: torch.zeros(1, device="cuda").new_full((2,), 1.0, device="cuda")
    new_tensor: torch.zeros(1).new_tensor([1.0, 1.0], device="cuda")
    legacy type: torch.cuda.FloatTensor([1, 1])
    legacy type, size: torch.cuda.FloatTensor(2).fill_(1)
    legacy conversion: torch.ones(2).type(torch.cuda.FloatTensor)
    legacy name: torch.ones(2).double().type("torch.cuda.FloatTensor")
    module: torch.nn.BatchNorm1d(2, device="cuda").weight.detach()
    module, to: torch.nn.BatchNorm1d(2).to("cuda").weight.detach()
    module, cuda: torch.nn.BatchNorm1d(2).cuda().weight.detach()
    module, to_empty: torch.nn.BatchNorm1d(2, device="meta").to_empty(device="cuda").weight.detach().fill_(1)
    lazy module: torch.nn.LazyConv1d(2, 1).to("cuda")(torch.zeros(1, 1, 1, device="cuda")).detach().flatten() * 0 + 1
    generator: torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) * 0 + 1
    storage: torch.tensor([], device="cpu").set_(torch.ones(2).untyped_storage()).cuda()
    """.strip().splitlines())}


@pytest.fixture(autouse=True)
def alias() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(cuda_alias())
        yield stack


@pytest.mark.parametrize("code", PLACES.values(), ids=list(PLACES))
def test_cuda_is_the_remote_device_wherever_it_is_named(code: str) -> None:
    made = eval(code)
    assert (type(made), made.device) == (LazyTensor, DEVICE)
    assert made.tolist() == [1.0, 1.0]
    assert made.is_cuda


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning", "ignore:Sparse:UserWarning")
@pytest.mark.parametrize("code", [
    'torch.UntypedStorage(4, device="cuda").is_cuda', 'torch.UntypedStorage([1, 2], device="cuda").tolist() == [1, 2]',
    'torch.TypedStorage(2, dtype=torch.float32, device="cuda").is_cuda', "torch.cuda.FloatStorage(2).is_cuda",
    "torch.ones(2).cuda().storage().is_cuda", "torch.ones(2).cuda().untyped_storage().cuda().is_cuda",
    "torch.ones(2).storage().cuda().tolist() == [1.0, 1.0]", "not torch.ones(2).storage().is_cuda",
    "torch.eye(2).cuda().to_sparse().is_cuda", "not torch.eye(2).to_sparse().is_cuda",
    'torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged, device="cuda").is_cuda',
    "torch.cuda.current_stream().cuda_stream == 0", "len(torch.cuda.Stream.priority_range()) == 2",
    "torch.cuda.profiler.start() is torch.cuda.profiler.stop() is None", "torch.cuda.tunable.is_enabled() is False",
    "torch.nn.parallel.scatter(torch.ones(2), [0])[0].is_cuda",
    "torch.nn.parallel.replicate(torch.nn.Linear(2, 1).cuda(), [0])[0].weight.is_cuda",
    "torch.nn.parallel.gather([torch.ones(1).cuda(), torch.zeros(1).cuda()], 0).tolist() == [1.0, 0.0]",
    "torch.nn.parallel.data_parallel(torch.nn.Linear(2, 1).cuda(), torch.ones(3, 2), [0]).shape == (3, 1)"])
def test_what_programs_ask_of_cuda_holds(code: str) -> None:
    assert eval(code)


def test_waits_are_not_found_by_the_debug_mode() -> None:
    assert torch.cuda.get_sync_debug_mode() == 0
    with pytest.warns(UserWarning, match="finds no waits"):
        torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    torch.cuda.set_sync_debug_mode(0)
    with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
        torch.cuda.set_sync_debug_mode("all")


def test_the_default_device_can_be_cuda() -> None:
    with torch.device("cuda"):
        made = [torch.ones(1), torch.tensor([1.0]), torch.nn.Linear(1, 1).weight]
    torch.set_default_device("cuda")
    try:
        made.append(torch.zeros(1))
        assert torch.get_default_device() == DEVICE
    finally:
        torch.set_default_device(None)
    assert {item.device for item in made} == {DEVICE}
    assert torch.ones(1).device.type == "cpu"


def test_ordinary_tensors_stay_what_they_are() -> None:
    plain = torch.ones(2).to("cpu", torch.float64)
    assert (type(plain), plain.is_cuda, plain.type()) == (torch.Tensor, False, "torch.DoubleTensor")
    assert torch.device("cuda", 0) == torch.device("cuda:0") != DEVICE
    assert isinstance(torch.Generator(), torch.Generator)


@pytest.mark.parametrize("code", [
    'torch.ones(2, device="cuda:1")', 'torch.ones(2).to("cuda:1")', 'torch.tensor(1, device="cuda:1")',
    "torch.ones(2).cuda(1)", "torch.cuda.set_device(1)", 'torch.cuda.device("cuda:1").__enter__()'])
def test_a_second_device_does_not_exist(code: str) -> None:
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
        eval(code)


def test_other_threads_see_it() -> None:
    seen: list[Any] = []

    def work() -> None:
        with torch.device("cuda"):
            seen.extend((torch.zeros(1).device, torch.ones(1).to("cuda").device, torch.cuda.is_available()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [DEVICE, DEVICE, True]


@pytest.mark.parametrize(("to", "places"), [
    (None, "cuda cpu"), ("cpu", "cpu cpu"), ("cuda", "cuda cuda"), (torch.device("cuda", 0), "cuda cuda"),
    ({"cuda:0": "cpu"}, "cpu cpu"), (lambda storage, place: storage, "cpu cpu"),
    (lambda storage, place: storage.cuda(0), "cuda cuda")])
def test_files_are_as_cuda_writes_them(to: Any, places: str) -> None:
    file = io.BytesIO()
    torch.save([torch.ones(2, device="cuda"), torch.zeros(2)], file)
    file.seek(0)
    made = torch.load(file, map_location=to)
    assert ["cuda" if item.is_cuda else "cpu" for item in made] == places.split()
    assert [item.tolist() for item in made] == [[1.0, 1.0], [0.0, 0.0]]
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"CUDA device 1 but torch.cuda.device_count\(\) is 1"):
        torch.load(file, map_location="cuda:1")


@pytest.mark.parametrize(("region", "dtype"), [
    (lambda: torch.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
    (lambda: torch.amp.autocast(device_type="cuda"), torch.float16),
    (lambda: torch.autocast("cuda", enabled=False), torch.float32)])
def test_autocast_of_cuda_is_that_of_the_remote_device(region: Any, dtype: torch.dtype) -> None:
    with region():
        assert torch.is_autocast_enabled() == torch.is_autocast_enabled("cuda") == (dtype != torch.float32)
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype == dtype
        assert torch.ones(2, 2) @ torch.ones(2, 2) == pytest.approx(torch.full((2, 2), 2.0))


@pytest.mark.filterwarnings("ignore:.torch.cuda.amp.:FutureWarning")
def test_older_names_of_mixed_precision_work() -> None:
    weight = torch.ones(2, 2, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.cuda.amp.GradScaler(init_scale=4.0)
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        loss = (weight @ torch.ones(2, 2, device="cuda")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (scaler.is_enabled(), scaler.get_scale()) == (True, 4.0)


def test_random_numbers_are_seeded_by_torch_cuda() -> None:
    torch.cuda.manual_seed(3)
    first = torch.randn(2, device="cuda")
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed_all(4)
        torch.randn(2, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.randn(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.randn(2, device="cuda").tolist() == second.tolist()
    expected = torch.Generator().manual_seed(3)
    assert [first.tolist(), second.tolist()] == [torch.randn(2, generator=expected).tolist() for _ in range(2)]


KEPT = frozenset(
    "cudaStatus device device_of max_memory_cached memory_cached "
    "reset_max_memory_allocated reset_max_memory_cached".split())
"""Functions and classes of torch.cuda that need no replacement, because they call some that are replaced."""


def test_each_function_of_torch_cuda_is_the_remote_devices_or_refuses(alias: ExitStack) -> None:
    names = [name for name in torch.cuda.__all__ if callable(getattr(torch.cuda, name))]
    inside = {name: getattr(torch.cuda, name) for name in names}
    alias.close()
    same = {name for name in names if inside[name] is getattr(torch.cuda, name) and not name.endswith("Storage")}
    exceptions = {name for name in same if isinstance(inside[name], type) and issubclass(inside[name], Exception)}
    assert same - exceptions == KEPT
    classes = {name for name in names if isinstance(getattr(torch.cuda, name), type)}
    assert {name for name in classes if not isinstance(inside[name], type)} == set(), "annotations name classes"
    assert len(names) > 100


def test_the_device_is_described_by_the_server() -> None:
    x = torch.ones(3, device="cuda")
    properties = torch.cuda.get_device_properties("cuda:0")
    assert torch.cuda.get_device_name(x.device) == properties.name != ""
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
    free, total = torch.cuda.mem_get_info(0)
    assert 0 < free <= total == properties.total_memory
    assert torch.cuda.memory_allocated() >= 12
    assert torch.cuda.max_memory_allocated("cuda") >= torch.cuda.memory_allocated(torch.device("cuda", 0))
    assert torch.cuda.is_bf16_supported()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()


def test_streams_and_events_order_and_measure() -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream("cuda", priority=-1)
    x = torch.ones(3, device="cuda")
    begin.record()
    with torch.cuda.stream(side), torch.cuda.device(0):
        assert torch.cuda.current_stream() == side
        y = x * 2
        y.record_stream(side)
    torch.cuda.current_stream("cuda").wait_stream(side)
    end.record(side)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream(0) != side
    assert isinstance(side, torch.cuda.Stream)
    assert isinstance(side, torch.Stream)
    assert isinstance(end, torch.cuda.Event)
    assert torch.Stream("cuda").device == torch.Event("cuda").device == DEVICE
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_data_parallel_trains_on_the_one_device() -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(2, 1, bias=False)).cuda()
    model(torch.ones(3, 2)).sum().backward()
    [weight] = model.parameters()
    assert weight.device == DEVICE
    assert weight.grad is not None
    assert weight.grad.tolist() == [[3.0, 3.0]]


def test_the_profiler_measures_the_remote_device() -> None:
    x = torch.ones(256, 256, device="cuda")
    x.sum().item()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as measured:
        (x @ x).sum().item()
    device_us = {row.key: row.self_device_time_total for row in measured.key_averages() if row.self_device_time_total}
    assert device_us["aten::matmul"] > 0


def test_the_compiler_of_cuda_programs_is_not_there() -> None:
    with pytest.warns(UserWarning, match="Not compiled"):
        model = torch.compile(torch.nn.Linear(2, 1, bias=False), mode="reduce-overhead").cuda()
    assert isinstance(model, torch._dynamo.OptimizedModule)
    assert list(model.state_dict()) == ["_orig_mod.weight"]
    with pytest.warns(UserWarning, match="Not compiled"):
        twice = torch.compile(dynamic=False)(lambda x: x.size(0) * x)
    assert model(torch.ones(1, 2, device="cuda")).tolist() == [[pytest.approx(model.weight.sum().item())]]
    assert twice(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).tolist() == [2.0]


def test_dynamo_finds_one_handler_for_each_function() -> None:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    assert TorchInGraphFunctionVariable._get_handlers.__wrapped__()


def test_legacy_types_know_their_tensors() -> None:
    made = torch.ones(2, device="cuda")
    assert made.type() == "torch.cuda.FloatTensor"
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made, torch.cuda.LongTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)


def test_legacy_types_of_sparse_tensors() -> None:
    indices, values = torch.tensor([[0, 1], [1, 0]], device="cuda"), torch.tensor([1.0, 2.0], device="cuda")
    made = torch.cuda.sparse.FloatTensor(indices, values, torch.Size((2, 2)))
    assert (made.to_dense().tolist(), made.type()) == ([[0, 1], [2, 0]], "torch.cuda.sparse.FloatTensor")
    assert isinstance(made, torch.cuda.sparse.FloatTensor)
    assert not isinstance(made, torch.cuda.sparse.DoubleTensor)
    assert not isinstance(values, torch.cuda.sparse.FloatTensor)
    assert torch.cuda.sparse.LongTensor(2, 3).shape == (2, 3)


def test_pinned_memory_is_for_this_device() -> None:
    pinned = torch.ones(2).pin_memory("cuda")
    assert pinned.is_pinned()
    assert pinned.to("cuda", non_blocking=True).tolist() == [1.0, 1.0]


def test_torchscript_compiles_functions_that_make_tensors_or_ask_for_autocast() -> None:
    assert torch.jit.script(_made_in_torchscript)(torch.ones(2, device="cuda")).tolist() == [3.0, 3.0]


def test_torchscript_modules_load_to_cuda() -> None:
    model, buffer = torch.nn.Linear(2, 1), io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    for place in ("cuda", torch.device("cuda", 0)):
        buffer.seek(0)
        loaded = torch.jit.load(buffer, map_location=place)
        assert loaded(torch.ones(1, 2, device="cuda")).tolist() == model(torch.ones(1, 2)).tolist()
    buffer.seek(0)
    assert torch.jit.load(buffer).weight.device == torch.device("cpu")


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 2).cuda())],
                         ids=["scripted", "traced"])
def test_torchscript_modules_are_saved_as_copies_on_the_cpu(make: Callable[[Any], Any], tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval()
    wanted = model(torch.ones(2, 2)).tolist()
    model[0].bias.requires_grad_(False)
    with torch.no_grad():
        scripted = make(model.cuda())
    torch.jit.save(scripted, tmp_path / "model.pt")
    assert scripted(torch.ones(2, 2).cuda()).tolist() == wanted
    loaded = torch.jit.load(tmp_path / "model.pt")
    assert loaded(torch.ones(2, 2)).tolist() == wanted
    assert [parameter.requires_grad for parameter in loaded.parameters()] == [True, False, True, True]


def test_fake_tensors_on_cuda_are_on_the_device() -> None:
    with FakeTensorMode():
        model = torch.nn.Linear(2, 3, device="cuda")
        made = model(torch.ones(4, 2, device="cuda")) + torch.ones(3).cuda()
        made.sum().backward()
    assert (tuple(made.shape), made.device.type) == ((4, 3), "remote_accelerator")


def _made_in_torchscript(x: torch.Tensor) -> torch.Tensor:
    return x if torch.is_autocast_enabled() else x + torch.tensor(2.0)


def test_what_needs_nvidias_own_code_is_not_there() -> None:
    for name in ("triton", "flash_attn", "bitsandbytes"):
        assert importlib.util.find_spec(name) is None
        with pytest.raises(ImportError):
            importlib.import_module(name)
    for use in (torch.cuda.CUDAGraph, torch.cuda.cudart, torch.cuda.graph_pool_handle, torch.cuda.memory._snapshot):
        with pytest.raises(RuntimeError, match="needs a CUDA device of this process"):
            use()
    with torch.cuda.nvtx.range("step {}", 1):
        torch.cuda.nvtx.mark("for a profiler that is not there")
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.get_arch_list() == []
    assert not torch.utils._triton.has_triton()


def test_a_program_that_records_its_memory_history_continues_and_learns_that_there_is_none(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="No memory history is recorded: the memory is the server's") as warned:
        torch.cuda.memory._record_memory_history(max_entries=100)
    assert {item.filename for item in warned} == {__file__}
    with pytest.warns(UserWarning, match=r"No snapshot of memory is written.*memory_stats\(\)"):
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    assert not list(tmp_path.iterdir())
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= 0


def test_nothing_is_left_of_it(alias: ExitStack) -> None:
    alias.close()
    before = _state()
    with cuda_alias():
        assert torch.ones(1).cuda().is_cuda
        inside = _state()
    assert {name for name in inside if inside[name] != before.get(name)} >= {
        "torch.tensor", "Tensor.to", "torch.cuda.is_available", "packages", "hidden", "available", "kernels"}
    assert _state() == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1).cuda()
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="cuda")


def _state() -> dict[str, Any]:
    """The identity of everything that could be replaced."""
    owners = [torch, torch.Tensor, LazyTensor, torch.UntypedStorage, torch.nn.Module, torch.amp.autocast_mode.autocast,
              torch.amp.GradScaler, _device, _device.DeviceContext, torch._utils, torch.utils._triton,
              torch.nn.parallel.data_parallel, torch.serialization, torch.jit._builtins, torch.nn.functional,
              *(module for name, module in sys.modules.items() if name.startswith("torch.cuda") and module)]
    held = {f"{owner.__name__}.{name}": id(item) for owner in owners for name, item in vars(owner).items()}
    return {
        **held, "packages": list(torch.serialization._package_registry),
        "builtins": dict(torch.jit._builtins._get_builtin_table()),
        "kernels": torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"),
        "hidden": [name for name, module in sys.modules.items() if module is None],
        "available": torch.accelerator.is_available(), "autocast": torch.is_autocast_enabled("cuda")}


