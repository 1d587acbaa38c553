"""Autocast gives what it gives on the executor's device; GradScaler scales, skips and grows as there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recording.believed_cuda import believed_cuda
from support.recording.eager import DEVICE, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from djinn import LazyTensor
from djinn_plugins.device.interceptor import autocast as product

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def _autocast(device: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> torch.autocast:
    return torch.autocast(device.partition(":")[0], dtype=dtype, **settings)


def _x(device: str, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1)).to(device)


def _half(device: str, *size: int) -> torch.Tensor:
    return _x(device, *size).bfloat16()


OPERATIONS: dict[str, Callable[[str], Any]] = {
    "mm": lambda d: _x(d, 4, 4) @ _x(d, 4, 4),
    "mixed_mm": lambda d: _x(d, 4, 4) @ _half(d, 4, 4),
    "double_mm": lambda d: _x(d, 4, 4).double() @ _x(d, 4, 4).double(),
    "linear": lambda d: F.linear(_x(d, 3, 4), _x(d, 2, 4), _x(d, 2)),
    "bmm": lambda d: torch.bmm(_x(d, 2, 3, 4), _half(d, 2, 4, 3)),
    "conv1d": lambda d: F.conv1d(_x(d, 1, 2, 8), _x(d, 3, 2, 3)),
    "conv2d_same": lambda d: F.conv2d(_x(d, 1, 2, 8, 8), _x(d, 3, 2, 3, 3), padding="same"),
    "conv_transpose2d": lambda d: F.conv_transpose2d(_x(d, 1, 2, 8, 8), _x(d, 2, 3, 3, 3)),
    "prelu": lambda d: F.prelu(_x(d, 3, 4), _x(d, 1)),
    "attention": lambda d: F.scaled_dot_product_attention(_x(d, 1, 2, 4, 8), _x(d, 1, 2, 4, 8), _x(d, 1, 2, 4, 8)),
    "masked_attention": lambda d: F.scaled_dot_product_attention(
        _x(d, 1, 2, 4, 8), _half(d, 1, 2, 4, 8), _x(d, 1, 2, 4, 8), attn_mask=_x(d, 4, 4)),
    "prod": lambda d: _half(d, 3, 4).prod(1),
    "cdist": lambda d: torch.cdist(_half(d, 3, 4), _half(d, 2, 4)),
    "trace": lambda d: _half(d, 4, 4).trace(),
    "mse": lambda d: F.mse_loss(_half(d, 4), _x(d, 4)),
    "cross_entropy": lambda d: F.cross_entropy(_half(d, 3, 4), torch.tensor([0, 3, 1]).to(d)),
    "bce": lambda d: F.binary_cross_entropy(_half(d, 4).sigmoid(), _half(d, 4).sigmoid()),
    "fft": lambda d: torch.fft.rfft(_half(d, 8)),
    "solve": lambda d: torch.linalg.solve(_half(d, 3, 3), _half(d, 3, 2)),
    "svdvals": lambda d: torch.linalg.svdvals(_half(d, 3, 3)),
    "avg_pool3d": lambda d: F.avg_pool3d(_half(d, 1, 1, 4, 4, 4), 2),
    "grid_sample": lambda d: F.grid_sample(_half(d, 1, 1, 4, 4), _half(d, 1, 2, 2, 2), align_corners=False),
    "pad": lambda d: F.pad(_half(d, 1, 1, 4), (1, 1), mode="reflect"),
    "quantile": lambda d: torch.quantile(_half(d, 8), 0.3),
    "cat": lambda d: torch.cat([_half(d, 2, 2), _x(d, 2, 2)]),
    "cat_halves": lambda d: torch.cat([_half(d, 2, 2), _half(d, 2, 2)]),
    "stack": lambda d: torch.stack([_x(d, 2), _half(d, 2)]),
    "stack_of_three": lambda d: torch.stack([_x(d, 2), _x(d, 2).half()]),
    "index_copy": lambda d: _x(d, 4).index_copy(0, torch.tensor([1]).to(d), _half(d, 1)),
    "softmax": lambda d: F.softmax(_half(d, 3, 4), -1),
    "layer_norm": lambda d: F.layer_norm(_x(d, 3, 4), (4,)),
    "sum": lambda d: _half(d, 8).sum(),
    "add": lambda d: _half(d, 4) + _x(d, 4),
    "einsum": lambda d: torch.einsum("ij,kj->ik", _x(d, 2, 4), _x(d, 3, 4)),
    "integers": lambda d: torch.arange(4, device=d).reshape(2, 2) @ torch.arange(4, device=d).reshape(2, 2),
    "rnn": lambda d: nn.RNN(4, 5).to(d)(_x(d, 3, 2, 4))[0],
    "gru": lambda d: nn.GRU(4, 5, 2).to(d)(_x(d, 3, 2, 4))[0],
    "lstm_cell": lambda d: nn.LSTMCell(4, 5).to(d)(_x(d, 2, 4))[0],
    "rnn_cell": lambda d: nn.RNNCell(4, 5).to(d)(_x(d, 2, 4)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
def test_operations_have_the_precision_of_eager(name: str, gradients: bool) -> None:
    def program(device: str) -> Any:
        with torch.set_grad_enabled(gradients), _autocast(device):
            return OPERATIONS[name](device)

    assert_same(program)


@pytest.mark.parametrize("device", ["cpu", str(DEVICE)])
def test_tensors_of_two_low_precisions_are_refused_as_in_eager(device: str) -> None:
    with _autocast(device), pytest.raises(RuntimeError, match="prioritize"):
        torch.stack([_half(device, 2), _x(device, 2).half()])


@pytest.mark.parametrize(("kind", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_the_lists_are_those_of_this_release(kind: str, key: str) -> None:
    registered = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    listed = [name for names in product.LISTS[kind].values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert registered <= set(listed), f"{torch.__version__} casts more: {registered - set(listed)}"


@DTYPES
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_training_steps_are_those_of_eager(dtype: torch.dtype, cache: bool) -> None:
    def program(device: str) -> list[Any]:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        seen: list[Any] = []
        for step in range(3):
            optimizer.zero_grad()
            with _autocast(device, dtype, cache_enabled=cache):
                y = model(_x(device, 4, 8) + step)
                z = model(y)
            loss = z.float().pow(2).mean()
            loss.backward()
            seen += [y, loss, *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
        return [*seen, *model.parameters()]

    assert_same(program)


def test_a_weight_that_is_used_twice_gathers_its_gradient_in_the_lower_precision() -> None:
    def gradient(device: str, *, cache: bool) -> torch.Tensor:
        weight = _x(device, 16, 16).requires_grad_()
        with _autocast(device, cache_enabled=cache):
            y = _x(device, 4, 16) @ weight @ weight @ weight
        y.float().pow(2).sum().backward()
        assert weight.grad is not None
        return weight.grad

    cached = assert_same(lambda device: gradient(device, cache=True))
    assert not torch.equal(cached.cpu(), assert_same(lambda device: gradient(device, cache=False)).cpu())


def test_casts_are_kept_within_a_region_only() -> None:
    model = nn.Linear(3, 3).to(DEVICE)
    region = _autocast(str(DEVICE))
    with region:
        model(torch.ones(1, 3, device=DEVICE))
        assert len(product._casts) == 2
        with _autocast(str(DEVICE)):
            model(torch.ones(1, 3, device=DEVICE))
        assert len(product._casts) == 2
    assert not product._casts
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with region:
        assert model(torch.ones(1, 3, device=DEVICE)).abs().sum().item() == 0
        torch.clear_autocast_cache()
        assert not product._casts
    model.to("cpu")


@pytest.mark.parametrize("place", [(torch, "mm"), (product, "_planted")], ids=["at the probe", "after the probe"])
def test_the_end_of_another_threads_region_keeps_no_cast(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = getattr(*place), nn.Linear(3, 3).to(DEVICE)

    def ended(*args: Any) -> Any:
        planted = plain(*args)
        torch.clear_autocast_cache()
        return planted

    with monkeypatch.context() as patch, _autocast(str(DEVICE)):
        patch.setattr(*place, ended)
        assert model(torch.ones(1, 3, device=DEVICE)).abs().sum().item() > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with _autocast(str(DEVICE)):
        assert model(torch.ones(1, 3, device=DEVICE)).abs().sum().item() == 0
    model.to("cpu")


def test_regions_nest_end_and_can_be_switched_off() -> None:
    def program(device: str) -> list[Any]:
        kind = device.partition(":")[0]
        x = _x(device, 4, 4)
        with _autocast(device):
            outer = x @ x
            with _autocast(device, enabled=False):
                off = x @ x
            with _autocast(device, torch.float16):
                inner = x @ x
            again = x @ x
        return [outer, off, inner, again, x @ x, torch.is_autocast_enabled(kind)]

    assert_same(program)


def test_a_region_of_another_device_leaves_remote_tensors_alone() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with _autocast(str(DEVICE)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (x @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_decorators_checkpoints_and_custom_functions() -> None:
    def program(device: str) -> list[Any]:
        kind = device.partition(":")[0]

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type=kind, cast_inputs=torch.float32)
            def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            @torch.amp.custom_bwd(device_type=kind)
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                x, w = ctx.saved_tensors
                return gradients[0] @ w.t(), x.t() @ gradients[0]

        model = nn.Linear(4, 4).to(device)
        x = _x(device, 3, 4).requires_grad_()
        w = _x(device, 4, 4).requires_grad_()
        decorated = _autocast(device)(model)(x)
        with _autocast(device):
            kept = checkpoint(model, x, use_reentrant=False)
            custom = Product.apply(x @ w, w)
        (kept.float().sum() + custom.sum() + decorated.float().sum()).backward()
        return [decorated, kept, custom, x.grad, w.grad, model.weight.grad]

    assert_same(program)


def test_an_lstm_has_the_dtype_of_eager() -> None:
    def program(device: str, *, lowers: bool = True) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.LSTM(4, 5, 2, bidirectional=True).to(device)
        with _autocast(device) if lowers else contextlib.nullcontext():
            made: torch.Tensor = layer(_x(device, 3, 2, 4))[0]
        return made

    # oneDNN has no such layers for some processors. Eager PyTorch raises there, djinn computes them in steps.
    local = program("cpu", lowers=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())).bfloat16()
    remote = program(str(DEVICE))
    assert remote.dtype == torch.bfloat16
    torch.testing.assert_close(remote.detach().cpu(), local.detach(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_scaler_scales_skips_and_grows_as_in_eager(fused: bool) -> None:
    def program(device: str) -> list[Any]:
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=2.0**10, growth_interval=2)
        seen: list[Any] = []
        for step in range(6):
            x = _x(device, 3, 4) * (float("inf") if step == 3 else step + 1)
            with _autocast(device, torch.float16):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            if step % 2 and not fused:
                scaler.unscale_(optimizer)
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).nan_to_num())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [scaler.get_scale(), *(p.detach().clone() for p in model.parameters())]
        other = torch.amp.GradScaler(device.partition(":")[0])
        other.load_state_dict(scaler.state_dict())
        return [*seen, scaler.state_dict(), other.get_scale()]

    made = assert_same(program)
    scales = [item for item in made if isinstance(item, float)]
    assert max(scales) > 2.0**10
    assert any(later < earlier for earlier, later in itertools.pairwise(scales))


def test_lists_of_cuda_are_followed_on_a_cuda_executor() -> None:
    with believed_cuda(), _autocast(str(DEVICE), torch.float16):
        x = torch.ones(4, 4, device=DEVICE)
        half = x @ x
        assert isinstance(half, LazyTensor)
        assert (half.dtype, half.exp().dtype, half.sum().dtype, half.norm().dtype, half.trace().dtype) == (
            torch.float16, torch.float32, torch.float32, torch.float32, torch.float16)
        assert torch.addcmul(half, x, half).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(half, half)


def test_a_checkpoint_in_autocast_saves_what_its_recomputation_saves() -> None:
    weights = torch.ones(3, 3, device=DEVICE, requires_grad=True)
    with torch.autocast("remote_accelerator", torch.bfloat16):
        # A first cast outside of the checkpoint; the recomputation casts anew.
        before = torch.ones(2, 3, device=DEVICE) @ weights
        result = checkpoint(lambda x: (x @ weights).relu(), before, use_reentrant=False)
    result.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[12.0] * 3] * 3
