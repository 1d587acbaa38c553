"""``nn.Module`` and ``nn.utils`` as people use them: parametrizations, pruning, averaging, surgery, moving."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.optim import swa_utils

import djinn


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)


def _x(device: str, *size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(size or (5, 3)).numel()).reshape(size or (5, 3)).to(device)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _step(model: nn.Module, x: torch.Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return _state(model)


def weight_norm(device: str) -> Any:
    model = parametrizations.weight_norm(nn.Linear(3, 2)).to(device)
    trained = _step(model, _x(device))
    parametrize.remove_parametrizations(model, "weight")
    return trained, model(_x(device)), isinstance(model.weight, nn.Parameter)


def spectral_norm(device: str) -> Any:
    model = parametrizations.spectral_norm(nn.Linear(3, 2)).to(device)
    trained = _step(model, _x(device))
    model.eval()
    return trained, model(_x(device)), model.weight


def orthogonal(device: str) -> Any:
    results = []
    for map_name in ("matrix_exp", "cayley", "householder"):
        model = parametrizations.orthogonal(nn.Linear(3, 3, bias=False), orthogonal_map=map_name).to(device)
        results.append((model.weight.shape, model(_x(device))))
    return results


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def own_parametrization(device: str) -> Any:
    model = nn.Linear(3, 3).to(device)
    parametrize.register_parametrization(model, "weight", Symmetric())
    model.weight = torch.ones(3, 3).to(device)
    with parametrize.cached():
        same = model.weight is model.weight
    trained = _step(model, _x(device))
    return trained, same, parametrize.is_parametrized(model, "weight"), model.parametrizations.weight.original


def old_weight_norm(device: str) -> Any:
    with pytest.warns(FutureWarning, match="deprecated"):
        model = nn.utils.weight_norm(nn.Linear(3, 2).to(device))
    linear = nn.Linear(3, 2).to(device)
    torch.manual_seed(1)
    trained = _step(model, _x(device))
    nn.utils.remove_weight_norm(model)
    return trained, model.weight, nn.utils.spectral_norm(linear)(_x(device))


def pruning(device: str) -> Any:
    model = _model(device)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.ln_structured(model[2], "weight", amount=0.5, n=2, dim=0)
    prune.global_unstructured([(model[0], "weight"), (model[2], "bias")], prune.L1Unstructured, amount=0.2)
    trained = _step(model, _x(device))
    masks = [b.clone() for b in model.buffers()]
    prune.remove(model[0], "weight")
    return trained, masks, _state(model), prune.is_pruned(model)


def clipping(device: str) -> Any:
    model = _model(device)
    results: list[Any] = []
    for kind in (2.0, 1.0, float("inf")):
        for foreach in (True, False, None):
            model.zero_grad()
            (model(_x(device)) * 10).sum().backward()
            results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=kind, foreach=foreach))
            results.append([p.grad.clone() for p in model.parameters()])
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    results.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    model[0].weight.grad.fill_(float("nan"))
    results.append(outcome(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)))
    return results, [p.grad for p in model.parameters()]


def vectors_of_parameters(device: str) -> Any:
    model = _model(device)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.arange(26.0).to(device), model.parameters())
    return vector, _state(model), model(_x(device))


def fusion(device: str) -> Any:
    conv, norm = nn.Conv2d(2, 3, 3).to(device).eval(), nn.BatchNorm2d(3).to(device).eval()
    norm.running_mean.add_(0.5)
    linear, norm1d = nn.Linear(3, 4).to(device).eval(), nn.BatchNorm1d(4).to(device).eval()
    fused = nn.utils.fusion.fuse_linear_bn_eval(linear, norm1d)
    return nn.utils.fusion.fuse_conv_bn_eval(conv, norm).weight, fused.bias


def averaging(device: str) -> Any:
    model = _model(device)
    mean = swa_utils.AveragedModel(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(3):
        optimizer.zero_grad()
        model(_x(device)).square().mean().backward()
        optimizer.step()
        mean.update_parameters(model)
        moving.update_parameters(model)
        schedule.step()
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    swa_utils.update_bn([_x(device)], normed)
    return _state(mean), _state(moving), mean(_x(device)), optimizer.param_groups[0]["lr"], _state(normed)


def schedulers(device: str) -> Any:
    lr = torch.optim.lr_scheduler
    results = []
    for make in (
        lambda o: lr.StepLR(o, 2), lambda o: lr.CosineAnnealingLR(o, 4), lambda o: lr.OneCycleLR(o, 0.3, 5),
        lambda o: lr.LambdaLR(o, lambda step: 0.9**step), lambda o: lr.CyclicLR(o, 0.01, 0.1),
        lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.5)], [2]),
        lambda o: lr.ReduceLROnPlateau(o, patience=0),
    ):
        model = _model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        schedule = make(optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(_x(device)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step(*((loss.detach(),) if isinstance(schedule, lr.ReduceLROnPlateau) else ()))
        results.append((optimizer.param_groups[0]["lr"], _state(model)))
    tensor_lr = torch.optim.Adam(_model(device).parameters(), lr=torch.tensor(0.1).to(device), foreach=False,
        capturable=False)
    return results, tensor_lr.param_groups[0]["lr"]


def surgery(device: str) -> Any:
    model = _model(device)
    model[2] = nn.Linear(4, 3).to(device)
    model.append(nn.Identity())
    model.register_buffer("scale", torch.full((2,), 3.0).to(device))
    model.register_buffer("hidden", torch.ones(1).to(device), persistent=False)
    model.register_parameter("extra", nn.Parameter(torch.zeros(2).to(device)))
    model.register_parameter("nothing", None)
    model.scale = torch.zeros(2).to(device)
    del model.extra
    wrong = outcome(lambda: setattr(model, "scale", 3)).split(":")[0]
    wrong_parameter = outcome(lambda: setattr(model[0], "weight", torch.ones(4, 3).to(device))).split(":")[0]
    model[0].weight = nn.Parameter(torch.ones(4, 3).to(device))
    model.apply(lambda m: nn.init.constant_(m.bias, 0.5) if isinstance(m, nn.Linear) else None)
    model[0].requires_grad_(False)
    names = [(name, p.requires_grad, isinstance(p, nn.Parameter)) for name, p in model.named_parameters()]
    blocks = nn.ModuleList([nn.Linear(2, 2).to(device)])
    blocks.extend([nn.Linear(2, 2).to(device)])
    blocks.insert(0, nn.Linear(2, 2).to(device))
    table = nn.ParameterDict({"a": nn.Parameter(torch.ones(1).to(device))})
    values = nn.ParameterList([torch.ones(1).to(device), nn.Parameter(torch.zeros(1).to(device))])
    return (
        _state(model), wrong, wrong_parameter, names, len(blocks), dict(table), list(values),
        model.get_parameter("0.weight"), sorted(name for name, _ in model.named_buffers()), repr(model),
    )


def dtypes(device: str) -> Any:
    results: list[Any] = []
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    weight = model[0].weight
    for change in (
        lambda m: m.half(), lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.float(),
        lambda m: m.to(torch.float64), lambda m: m.to(device, torch.float32), lambda m: m.type(torch.float64),
        lambda m: m.to(torch.ones(1, dtype=torch.float32).to(device)),
    ):
        change(model)
        results.append((_state(model), model[0].weight is weight, weight.dtype))
    model(_x(device)).sum().backward()
    model.double()
    results.append(weight.grad)
    return results


def state_dicts(device: str) -> Any:
    model, twin = _model(device), _model(device)
    model._register_state_dict_hook(lambda _, state, *__: state.update(more=torch.ones(1).to(device)))
    model.register_state_dict_pre_hook(lambda *_: None)
    state = model.state_dict()
    strict = outcome(lambda: twin.load_state_dict(state))
    keys = twin.load_state_dict(state, strict=False)
    weight = twin[0].weight
    twin.register_load_state_dict_post_hook(lambda _, result: result.unexpected_keys.clear())
    twin.load_state_dict(state)
    state.pop("more")
    twin.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    wrong = outcome(lambda: twin.load_state_dict({**state, "0.weight": torch.ones(1).to(device)}))
    local = twin.load_state_dict({name: torch.zeros(value.shape) for name, value in state.items()})
    return (
        strict, keys, _state(twin), twin[0].weight is weight, wrong, local, state,
        OrderedDict(model.state_dict(keep_vars=True)),
    )


def copies_and_ties(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    shallow = copy.copy(model)
    trained = _step(model, _x(device))
    return (
        trained, _state(twin), twin[0].weight is twin[1].weight, shallow[0].weight is model[0].weight,
        len(list(model.parameters())), copy.deepcopy(model[0].weight.detach()), copy.copy(model[0].weight),
    )


def lazy_modules(device: str) -> Any:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).to(device)
    return model(_x(device)), _state(model)


def skip_init_and_empty(device: str) -> Any:
    skipped = nn.utils.skip_init(nn.Linear, 3, 2, device=device)
    with torch.no_grad():
        skipped.weight.fill_(1)
        skipped.bias.zero_()
    meta = nn.Linear(3, 2, device="meta").to_empty(device=device)
    nn.init.ones_(meta.weight)
    nn.init.zeros_(meta.bias)
    loaded = nn.Linear(3, 2, device="meta")
    loaded.load_state_dict(meta.state_dict(), assign=True)
    refused = outcome(lambda: nn.Linear(1, 1, device="meta").to("cpu" if device == "cpu" else DEVICE))
    return skipped(_x(device)), meta(_x(device)), loaded(_x(device)), refused


def initialisations(device: str) -> Any:
    results = []
    for init in (nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.trunc_normal_,
                 nn.init.uniform_, nn.init.normal_, nn.init.eye_):
        torch.manual_seed(3)
        results.append(init(torch.empty(4, 3).to(device)))
    torch.manual_seed(3)
    results.append(nn.init.dirac_(torch.empty(3, 4, 2).to(device)))
    results.append(nn.init.sparse_(torch.empty(4, 3).to(device), 0.0).abs() > 0)
    return results


def packed_sequences(device: str) -> Any:
    x = _x(device, 3, 4, 2)
    lengths = torch.tensor([4, 2, 3])
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    padded, found = rnn.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
    sequence = rnn.pack_sequence([x[0], x[1, :2]])
    pads = rnn.pad_sequence([x[0], x[1, :2], x[2, :1]], padding_value=7.0)
    return (
        tuple(packed), padded, found, tuple(sequence), pads, rnn.unpad_sequence(pads, torch.tensor([4, 2, 1])),
        outcome(lambda: rnn.pack_padded_sequence(x, lengths, batch_first=True)), tuple(packed.double()),
    )


def recurrent_over_packed(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.RNN(2, 3, batch_first=True).to(device)
    packed = rnn.pack_padded_sequence(_x(device, 3, 4, 2), torch.tensor([4, 3, 1]), batch_first=True)
    output, hidden = model(packed)
    padded, lengths = rnn.pad_packed_sequence(output, batch_first=True)
    padded.sum().backward()
    return padded.shape, lengths, hidden.shape, isinstance(output, rnn.PackedSequence)


@programs(
    weight_norm, spectral_norm, orthogonal, own_parametrization, old_weight_norm, pruning, clipping,
    vectors_of_parameters, fusion, averaging, schedulers, surgery, dtypes, state_dicts, copies_and_ties, lazy_modules,
    skip_init_and_empty, initialisations, packed_sequences, recurrent_over_packed,
)
def test_modules_equal_eager(program: Program) -> None:
    assert_same(program)


def test_a_module_moves_while_a_graph_and_a_view_are_alive() -> None:
    model = nn.Linear(3, 2)
    weight, bias = model.weight, model.bias
    values = weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = model(torch.ones(1, 3))
    row, alias = weight[0], weight.detach()
    model.to(DEVICE)
    assert model.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, djinn.LazyTensor)
    assert (weight.device, weight.requires_grad, weight.is_leaf) == (DEVICE, True, True)
    assert (type(row), type(alias), row.device.type) == (torch.Tensor, torch.Tensor, "cpu")
    assert torch.equal(alias, values)
    assert torch.equal(weight.detach().cpu(), values)
    model(torch.ones(1, 3, device=DEVICE)).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.ones(2, 3))
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), values - 1)
    assert torch.equal(alias, values)
    assert repr(weight).startswith("Parameter containing:")
    assert result.shape == (1, 2)
    held = model(torch.ones(1, 3, device=DEVICE)).sum()
    model.cpu()
    assert type(weight) is nn.Parameter
    assert type(bias) is nn.Parameter
    assert torch.equal(weight.detach(), values - 1)
    assert torch.equal(weight.grad, torch.ones(2, 3))
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 3) * 2)
    del held
    model.to(DEVICE)
    assert torch.equal(weight.detach().cpu(), values - 1)


def test_a_module_moves_whether_or_not_parameters_are_swapped() -> None:
    for set_up in (torch.__future__.set_swap_module_params_on_conversion,
                   torch.__future__.set_overwrite_module_params_on_conversion):
        set_up(True)
        try:
            model = nn.Linear(3, 2)
            values = model.weight.detach().clone()
            assert isinstance(model.to(DEVICE).weight, djinn.LazyTensor)
            assert torch.equal(model.weight.detach().cpu(), values)
            assert type(model.cpu().weight) is nn.Parameter
            assert torch.equal(model.weight.detach(), values)
        finally:
            set_up(False)


def test_data_of_an_ordinary_tensor_takes_a_lazy_one() -> None:
    parameter = nn.Parameter(torch.ones(3))
    view = parameter.detach()
    remote = torch.tensor([1.0, 2.0], device=DEVICE)
    parameter.data = remote
    assert isinstance(parameter, djinn.LazyTensor)
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.device) == ((2,), DEVICE)
    assert view.tolist() == [1.0, 1.0, 1.0]
    remote.add_(1)
    assert parameter.tolist() == [2.0, 3.0]
    parameter.detach().mul_(2)
    assert remote.tolist() == [4.0, 6.0]
    (parameter * parameter).sum().backward()
    assert parameter.grad.tolist() == [8.0, 12.0]
    plain = torch.zeros(2)
    plain.data = torch.ones(4, 2, device=DEVICE).t()
    assert (plain.stride(), plain.t().stride(), plain[0].sum().item()) == ((1, 2), (2, 1), 4.0)
    plain.unsqueeze_(0)
    assert plain.shape == (1, 2, 4)
    with pytest.raises(RuntimeError):
        nn.Parameter(torch.ones(1)).data = torch.ones(1, dtype=torch.int64, device=DEVICE)


VIEWS = (
    lambda x: x.detach(), lambda x: x.alias() if hasattr(x, "alias") else torch.ops.aten.alias(x), lambda x: x.t(),
    lambda x: x[0],
    lambda x: x[:, 1:], lambda x: x.view(-1), lambda x: x.reshape(3, 2), lambda x: x.expand(2, 2, 3),
    lambda x: x.unbind()[1],
    lambda x: x.split(1)[0], lambda x: x.chunk(3, 1)[2], lambda x: x.diagonal(), lambda x: x.unsqueeze(1),
    lambda x: x.permute(1, 0), lambda x: x.as_strided((2,), (2,), 1), lambda x: x.unfold(1, 2, 1),
    lambda x: x.view(torch.int32),
    lambda x: x.movedim(0, 1), lambda x: x.narrow(1, 0, 2), lambda x: x.squeeze(), lambda x: x.tensor_split(2, 1)[1],
    lambda x: x.view_as(x), lambda x: x.swapaxes(0, 1), lambda x: x.hsplit(3)[0], lambda x: x.data,
    lambda x: x.requires_grad_().detach(),
    lambda x: torch.view_as_complex(x.view(3, 2)), lambda x: x.clone(), lambda x: x.contiguous(), torch.ones_like,
    lambda x: x.new_zeros(2), lambda x: torch._foreach_add([x], 1)[0], lambda x: x.t_(), lambda x: x.unsqueeze_(0),
    lambda x: x.transpose_(0, 1), lambda x: x.squeeze_(), lambda x: x.as_strided_((2,), (1,)), lambda x: x.resize_(3),
    lambda x: x.set_(x[0]), lambda x: x.zero_(), lambda x: x.fill_(2), lambda x: x.uniform_().ge(0), lambda x: x.neg_(),
    lambda x: x.cpu().tolist(), lambda x: x.double(), lambda x: x.max(1), lambda x: x.sum(), lambda x: x.nonzero(),
    lambda x: x[x > 2],
    lambda x: x.to(torch.complex64).conj(), lambda x: x.is_contiguous(), lambda x: x.tolist(),
    lambda x: x.storage_offset(),
    lambda x: torch.equal(x, x), lambda x: x.copy_(torch.ones(2, 3)), lambda x: x.flatten(),
    lambda x: x.type(torch.int64),
    torch.linalg.norm, lambda x: torch.cat([x, x]), lambda x: torch.stack([x, x]).sum(0), lambda x: x @ x.T,
    lambda x: x.cov(), lambda x: torch.nn.functional.softmax(x, -1),
    lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    lambda x: x.real, lambda x: x.repeat(2, 1), lambda x: x.roll(1),
    lambda x: x.item() if x.numel() == 1 else x.numel(),
)


OVERLAPPING = (15, 63)
"""Views that overlap themselves; a server refuses to write to them, see docs/server.md."""


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("number", OVERLAPPING)
def test_an_overlapping_view_of_data_that_became_lazy_can_be_written(number: int) -> None:
    test_a_tensor_whose_data_became_lazy_behaves_as_a_lazy_one(number)


@pytest.mark.parametrize("number", sorted({*range(len(VIEWS))} - {*OVERLAPPING}))
def test_a_tensor_whose_data_became_lazy_behaves_as_a_lazy_one(number: int) -> None:
    def program(device: str) -> Any:
        base = torch.arange(6.0).reshape(2, 3).to(device)
        x = torch.zeros(1)
        x.data = base
        result = VIEWS[number](x)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not result.requires_grad:
            values = result.clone()
            result.mul_(3) if number != 7 else None
            return result, values, x, base
        return result, x, base

    assert_same(program)


def test_a_saved_module_that_moved_is_ordinary() -> None:
    model = nn.Linear(2, 2)
    held = model(torch.ones(1, 2))
    model.to(DEVICE)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], model.weight.detach().cpu())
    assert held.shape == (1, 2)
