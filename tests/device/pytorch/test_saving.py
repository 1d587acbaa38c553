"""What is saved is all there, shares what it shared, and loads to either side."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.recording.eager import DEVICE, outcome
from torch import nn

import djinn
from djinn import LazyTensor
from djinn.errors import UnsupportedTensorError

SIDES = pytest.mark.parametrize(("source", "target"), [("cpu", DEVICE), (DEVICE, "cpu"), (DEVICE, DEVICE)])


class Tied(nn.Module):
    """Two names for one weight, a buffer, and a parameter with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def _tensors() -> dict[str, torch.Tensor]:
    made = {
        "whole": torch.arange(12.0).reshape(3, 4),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "parameter": nn.Parameter(torch.ones(2)),
        "gradient": torch.ones(2, requires_grad=True),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    return {**made, "view": made["whole"][1:, 1:]}


def test_dtypes_that_the_old_format_does_not_know() -> None:
    for tensor in (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint16)):
        for loaded in (_through_file(tensor.to(DEVICE)), _through_file(tensor, map_location=DEVICE)):
            assert torch.equal(loaded.cpu().view(torch.uint8), tensor.view(torch.uint8))


def _through_file(saved: Any, *, zipped: bool = True, **settings: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, **settings)


def _assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.detach().cpu(), expected.detach().cpu())
    assert (found.dtype, found.stride(), found.requires_grad) == (
        expected.dtype, expected.stride(), expected.requires_grad)
    assert isinstance(found, nn.Parameter) == isinstance(expected, nn.Parameter)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old_format"])
@pytest.mark.parametrize("location", [
    DEVICE, "remote_accelerator:0", "remote_accelerator", {"cpu": "remote_accelerator:0"},
    lambda storage, where: torch.serialization.default_restore_location(storage, "remote_accelerator:0"),
], ids=["device", "name", "kind", "mapping", "function"])
def test_files_load_to_the_device(location: Any, *, zipped: bool, weights_only: bool) -> None:
    expected = _tensors()
    loaded = _through_file(expected, zipped=zipped, map_location=location, weights_only=weights_only)
    for name, tensor in expected.items():
        assert isinstance(loaded[name], LazyTensor), name
        _assert_equal(loaded[name], tensor)
    loaded["view"].fill_(70.0)
    assert loaded["whole"].tolist() == [[0, 1, 2, 3], [4, 70, 70, 70], [8, 70, 70, 70]]


def test_files_load_where_the_device_is_the_default() -> None:
    file = io.BytesIO()
    torch.save({"here": torch.ones(2), "there": torch.zeros(2, device=DEVICE)}, file)
    file.seek(0)
    with torch.device(DEVICE):
        loaded = torch.load(file)
        copied = pickle.loads(pickle.dumps(loaded))
    assert [tensor.cpu().tolist() for tensor in (*loaded.values(), *copied.values())] == [[1, 1], [0, 0]] * 2


def test_files_that_are_mapped_into_memory_load_to_the_device(tmp_path: Path) -> None:
    torch.save(_tensors(), tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location=DEVICE, mmap=True)
    _assert_equal(loaded["whole"], _tensors()["whole"])


def test_there_is_one_device_to_load_to() -> None:
    with pytest.raises(RuntimeError, match="there is 1 remote accelerator"):
        _through_file(torch.ones(2), map_location="remote_accelerator:1")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old_format"])
def test_remote_tensors_are_saved_with_their_data_and_share_what_they_shared(*, zipped: bool) -> None:
    remote = _through_file(_tensors(), map_location=DEVICE)
    loaded = _through_file(remote, zipped=zipped)
    for name, tensor in _tensors().items():
        assert loaded[name].device.type == "cpu"
        _assert_equal(loaded[name], tensor)
    assert loaded["view"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()


def test_views_that_have_lost_their_base_are_whole_in_the_file() -> None:
    whole = torch.arange(6.0, device=DEVICE)
    longer, shorter = whole[1:].detach(), whole[:2].detach()
    del whole
    loaded = _through_file({"longer": longer, "shorter": shorter})
    assert loaded["longer"].tolist() == [1, 2, 3, 4, 5]
    assert loaded["shorter"].tolist() == [0, 1]


def test_a_state_dict_of_tied_weights_is_as_large_as_in_eager() -> None:
    sizes = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        file = io.BytesIO()
        torch.save(Tied().to(device).state_dict(), file)
        sizes.append(len(file.getvalue()))
        file.seek(0)
        loaded = torch.load(file)
        assert (loaded["embedding.weight"].untyped_storage().data_ptr()
                == loaded["head.weight"].untyped_storage().data_ptr())
    assert sizes[0] == sizes[1]


@SIDES
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_modules_go_both_ways(source: Any, target: Any, *, assign: bool) -> None:
    first, second = Tied().to(source), Tied().to(target)
    first.norm(torch.ones(2, 3, device=source))
    before = second.embedding.weight
    result = second.load_state_dict(first.state_dict(), strict=True, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert (second.embedding.weight is before) is not assign
    assert second.embedding.weight.device.type == torch.device(source if assign else target).type
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name].cpu(), tensor.cpu()), name
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in second.parameters())


def test_strictness_is_that_of_eager() -> None:
    for device in ("cpu", DEVICE):
        model = Tied().to(device)
        state = model.state_dict()
        state["more"] = state.pop("head.weight")
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(state)
        state = model.state_dict() | {"head.weight": torch.ones(2, 2, device=device)}
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(state)


@SIDES
def test_state_dicts_of_optimizers_go_both_ways(source: Any, target: Any) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3, device=device)).pow(2).sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    reference, first, second = nn.Linear(3, 2), nn.Linear(3, 2).to(source), nn.Linear(3, 2).to(target)
    first.load_state_dict(reference.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (reference, first, second)]
    for _ in range(2):
        step(reference, optimizers[0], "cpu")
    step(first, optimizers[1], source)
    second.load_state_dict(first.state_dict())
    optimizers[2].load_state_dict(_through_file(optimizers[1].state_dict()))
    step(second, optimizers[2], target)
    assert torch.equal(second.weight.detach().cpu(), reference.weight.detach())
    assert optimizers[2].state[second.weight]["exp_avg"].device.type == torch.device(target).type


@pytest.mark.parametrize("location", [None, DEVICE], ids=["as_saved", "to_device"])
def test_whole_modules_are_saved(location: Any) -> None:
    model = Tied().to(DEVICE)
    model.embedding.weight.note = "kept"
    loaded = _through_file(model, weights_only=False, map_location=location)
    assert type(loaded) is Tied
    assert loaded.embedding.weight is loaded.head.weight
    assert loaded.embedding.weight.note == "kept"
    assert isinstance(loaded.embedding.weight, nn.Parameter)
    assert loaded.embedding.weight.device.type == ("cpu" if location is None else DEVICE.type)
    assert torch.equal(loaded.embedding.weight.detach().cpu(), model.embedding.weight.detach().cpu())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_data(protocol: int) -> None:
    for name, tensor in _tensors().items():
        remote = tensor.detach().to(DEVICE)
        assert torch.equal(pickle.loads(pickle.dumps(remote, protocol)), tensor.detach()), name


def _save_state(device: Any, path: Path) -> None:
    safetensors.torch.save_file(nn.Linear(3, 4).to(device).state_dict(), path)


def _save_tied_model(device: Any, path: Path) -> None:
    safetensors.torch.save_model(Tied().to(device), str(path))


def _save_tied_state(device: Any, path: Path) -> None:
    safetensors.torch.save_file(Tied().to(device).state_dict(), path)


def _save_apart(device: Any, path: Path) -> None:
    x = torch.arange(3.0, device=device)
    safetensors.torch.save_file({"a": x[:2], "b": x[2:]}, path)


def _save_overlapping(device: Any, path: Path) -> None:
    x = torch.arange(3.0, device=device)
    safetensors.torch.save_file({"a": x[:2], "b": x[1:]}, path)


def _save_transposed(device: Any, path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2, 3, device=device).t()}, path)


def _save_bytes(device: Any, path: Path) -> None:
    path.write_bytes(safetensors.torch.save({"a": torch.arange(4, device=device), "b": torch.ones(2, device=device)}))


@pytest.mark.parametrize("save", [
    _save_state, _save_tied_model, _save_tied_state, _save_apart, _save_overlapping, _save_transposed, _save_bytes,
])
def test_safetensors_writes_what_it_writes_of_local_tensors(save: Callable[..., None], tmp_path: Path) -> None:
    outcomes = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        path = tmp_path / f"{torch.device(device).type}.safetensors"
        outcomes.append(outcome(lambda device=device, path=path: save(device, path)) or path.read_bytes())
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) > 20


def test_safetensors_loads_into_a_remote_model(tmp_path: Path) -> None:
    model, other = Tied().to(DEVICE), Tied().to(DEVICE)
    safetensors.torch.save_model(model, str(tmp_path / "m"))
    assert safetensors.torch.load_model(other, str(tmp_path / "m")) == (set(), [])
    assert other.embedding.weight is other.head.weight
    assert torch.equal(other.head.weight.detach().cpu(), model.head.weight.detach().cpu())
    loaded = {name: tensor.to(DEVICE) for name, tensor in safetensors.torch.load_file(tmp_path / "m").items()}
    assert isinstance(loaded["norm.bias"], LazyTensor)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_saves_a_remote_model(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "local")
    model.to(DEVICE).save_pretrained(tmp_path / "remote")
    contents = [(tmp_path / side / "model.safetensors").read_bytes() for side in ("local", "remote")]
    assert contents[0] == contents[1]
    tokens = torch.tensor([[1, 2, 3]])
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "remote")
    assert torch.equal(again(tokens).logits, model(tokens.to(DEVICE)).logits.cpu())


def test_addresses_tell_tensors_apart_and_nothing_else() -> None:
    x = torch.arange(12.0, device=DEVICE).reshape(3, 4)
    assert x.data_ptr() == x.detach().data_ptr() == x.t().untyped_storage().data_ptr()
    assert x[1].data_ptr() - x.data_ptr() == 16
    assert x.data_ptr() != x.clone().data_ptr()
    assert torch.empty(0, device=DEVICE).data_ptr() == x[3:].data_ptr() == 0
    assert (x[1:].untyped_storage().nbytes(), x[:, ::2].untyped_storage().nbytes()) == (48, 48)
    assert x.data_ptr() >= 1 << 64, "it could be taken for an address"


@pytest.mark.parametrize("action", [
    lambda storage: storage[0], lambda storage: storage.__setitem__(0, 1), list,
    lambda storage: storage.fill_(0), lambda storage: storage.copy_(storage),
    lambda storage: storage.float(), lambda storage: storage.pin_memory(),
], ids=["read", "write", "iterate", "fill", "copy", "convert", "pin"])
def test_a_storage_does_not_pretend_to_have_bytes_here(action: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedTensorError, match="memory"):
        action(torch.ones(2, device=DEVICE).untyped_storage())


def test_processes_get_copies_in_messages_and_cannot_share_tensors() -> None:
    model = nn.Linear(2, 1).to(DEVICE)
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(model.weight.detach())
    assert queue.get().tolist() == model.weight.tolist()
    with pytest.raises(UnsupportedTensorError, match="cannot share a remote tensor"):
        model.share_memory()
    process = multiprocessing.get_context("spawn").Process(target=print, args=(model,))
    with pytest.raises(UnsupportedTensorError, match="cannot share a remote tensor"):
        process.start()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_storages_come_home_and_can_be_set() -> None:
    x = torch.arange(4.0, device=DEVICE)
    assert x.untyped_storage().cpu().tolist() == torch.arange(4.0).untyped_storage().tolist()
    assert _through_file(x.storage(), weights_only=False).tolist() == [0, 1, 2, 3]
    view = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 1, (2,), (1,))
    view.mul_(10)
    assert x.tolist() == [0, 10, 20, 3]
    whole = torch.empty(0, dtype=torch.int32, device=DEVICE).set_(x.untyped_storage())
    assert whole.tolist() == torch.tensor([0.0, 10.0, 20.0, 3.0]).view(torch.int32).tolist()
    for target, storage in ((torch.ones(1, device=DEVICE), torch.ones(1)), (torch.ones(1), x)):
        with pytest.raises(RuntimeError, match="different device"):
            target.set_(storage.untyped_storage())


@pytest.mark.parametrize("make", [
    lambda device: torch.arange(6.0, device=device)[1:5],
    lambda device: torch.arange(6, device=device).to(torch.complex64).conj(),
    lambda device: torch.view_as_real(torch.arange(3, device=device).to(torch.complex64).conj().resolve_conj())[:, 1],
    lambda device: torch.imag(torch.full((3,), 1 + 2j, device=device).conj()),
    lambda device: torch.tensor([True, False], device=device),
    lambda device: torch.empty(0, device=device),
], ids=["view", "conjugated", "strided", "negated", "bool", "empty"])
@pytest.mark.parametrize("copied", [lambda storage: storage.clone(), copy.copy, copy.deepcopy],
                         ids=["clone", "copy", "deepcopy"])
@pytest.mark.usefixtures("session")
def test_storages_are_copied_on_the_device(copied: Callable[[Any], Any], make: Callable[[Any], torch.Tensor]) -> None:
    tensor, local = make(DEVICE), make("cpu")
    made = copied(tensor.untyped_storage())
    again = torch.empty(0, dtype=tensor.dtype, device=DEVICE).set_(
        made, tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.zero_()
    assert (made.device, made.nbytes()) == (DEVICE, local.untyped_storage().nbytes())
    assert made.tolist() == local.untyped_storage().tolist()
    expected = torch.empty(0, dtype=local.dtype).set_(
        local.untyped_storage(), local.storage_offset(), local.size(), local.stride())
    assert torch.equal(again.cpu(), expected)
    again.fill_(1)
    assert not tensor.any()


def test_nothing_is_written_of_a_session_that_has_ended() -> None:
    x = torch.ones(2, device=DEVICE)
    djinn.init()
    with pytest.raises(djinn.SessionClosedError):
        torch.save(x, io.BytesIO())


def test_a_storage_equals_itself_alone() -> None:
    x, y = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
    assert x.untyped_storage() == x[1:].untyped_storage() != y.untyped_storage()
    assert len({x.untyped_storage(), x[1:].untyped_storage(), y.untyped_storage()}) == 2


def test_hooks_are_not_saved_which_is_said() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    x.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="will not be serialized"):
        torch.save(x, io.BytesIO())
