"""``torch.func`` and forward-mode differentiation, alone and nested."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from typing import Any

import pytest
import torch
from support.recording.eager import Program, assert_same, outcome, programs
from torch import func, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import djinn


def _on(device: str, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(size, dtype=torch.float64).to(device) for size in sizes]


def vmaps(device: str) -> Any:
    x, w, v = _on(device, (5, 3), (3, 2), (5, 3))
    return (
        func.vmap(lambda a: a @ w)(x),
        func.vmap(torch.dot)(x, v),
        func.vmap(lambda a, b: a + b, in_dims=(0, None))(x, v[0]),
        func.vmap(lambda a: a.cumsum(0), in_dims=1, out_dims=1)(x),
        func.vmap(func.vmap(lambda a: a.sin()))(x),
        func.vmap(lambda a: {"sum": a.sum(), "top": a.topk(2)})(x),
        func.vmap(lambda a: a.softmax(-1), chunk_size=2)(x),
        func.vmap(lambda a: a + torch.zeros(3, device=device, dtype=a.dtype))(x),
        func.vmap(lambda a: a.index_select(0, torch.tensor([0, 2], device=device)))(x),
        func.vmap(lambda a: torch.where(a > 0, a, -a).max(-1))(x),
        outcome(lambda: func.vmap(lambda a: a.sum().item())(x)),
        outcome(lambda: func.vmap(lambda a, b: a + b)(x, v[:2])),
        outcome(lambda: func.vmap(lambda a: 1)(x)),
        outcome(lambda: func.vmap(lambda a: a.nonzero())(x)),
    )


def values_within(device: str) -> Any:
    """What a function brings home of a tensor that no transform made, and how the tensor is afterwards."""
    (x,) = _on(device, (3,))
    found: list[Any] = []

    def look(y: torch.Tensor) -> torch.Tensor:
        file = io.BytesIO()
        torch.save(x, file)
        found.extend((x.tolist(), x[1].item(), repr(x).partition(", dev")[0].rstrip(")"), len(file.getvalue()) > 0,
                      bool(x[0] > 0), torch.equal(x, x.clone()), tuple(x[x > 0].shape), float(x[2])))
        return y.sum()

    ones = torch.ones(2, device=device)
    copies: list[Any] = []
    func.vjp(lambda y: copies.append(copy.deepcopy(x).tolist()) or y, ones)
    func.vjp(look, ones)
    func.jvp(look, (ones,), (ones,))
    func.functionalize(look)(ones)
    func.vmap(func.grad(look))(torch.ones(2, 2, device=device))
    return found, copies, x + 1


def vmaps_that_write(device: str) -> Any:
    x, y = _on(device, (5, 3), (5, 3))

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(b)
        a[0] = 0
        return a.mul_(2)

    return func.vmap(step)(x, y), x, outcome(lambda: func.vmap(lambda a, b: a.add_(b), in_dims=(None, 0))(x[0], y))


def random_vmaps(device: str) -> Any:
    (x,) = _on(device, (4, 3))
    torch.manual_seed(1)

    def draw(a: torch.Tensor) -> torch.Tensor:
        return a + torch.randn(3, device=device, dtype=a.dtype)

    return (
        func.vmap(draw, randomness="different")(x),
        func.vmap(draw, randomness="same")(x),
        func.vmap(lambda a: torch.nn.functional.dropout(a, 0.5), randomness="different")(x),
        outcome(lambda: func.vmap(draw)(x)),
    )


def gradients(device: str) -> Any:
    x, w = _on(device, (3,), (3,))

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sin().sum()

    return (
        func.grad(loss)(x, w),
        func.grad(loss, argnums=(0, 1))(x, w),
        func.grad_and_value(loss)(x, w),
        func.grad(lambda a: (loss(a, w), {"extra": a * 2}), has_aux=True)(x),
        func.grad(lambda a: func.grad(loss)(a, w).pow(2).sum())(x),
        func.vmap(func.grad(loss), in_dims=(0, None))(x.expand(4, 3), w),
        outcome(lambda: func.grad(lambda a: a)(x)),
        outcome(lambda: func.grad(lambda a: 3.0)(x)),
    )


def products(device: str) -> Any:
    x, v = _on(device, (3,), (3,))

    def f(a: torch.Tensor) -> torch.Tensor:
        return a.sin() * a.sum()

    value, pull = func.vjp(f, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
        linear_value, push = func.linearize(f, x)
    return (
        value, pull(v), func.jvp(f, (x,), (v,)), linear_value, push(v), func.vjp(lambda a: (f(a), a), x)[0],
        func.vmap(pull)(torch.eye(3, dtype=v.dtype).to(device)),
    )


def jacobians(device: str) -> Any:
    x, y = _on(device, (3,), (3,))

    def f(a: torch.Tensor) -> torch.Tensor:
        return a.pow(3) * a.flip(0)

    def scalar(a: torch.Tensor) -> torch.Tensor:
        return f(a).sum()

    return (
        func.jacrev(f)(x), func.jacfwd(f)(x), func.jacrev(f, chunk_size=2)(x), func.hessian(scalar)(x),
        func.jacfwd(func.jacfwd(scalar))(x), func.jacrev(func.jacrev(scalar))(x), func.jacrev(func.jacfwd(scalar))(x),
        func.jacrev(lambda a, b: a * b, argnums=(0, 1))(x, y), func.vmap(func.hessian(scalar))(x.expand(2, 3)),
        func.vmap(func.jacrev(f))(torch.stack([x, y])), func.jvp(func.grad(scalar), (x,), (y,)),
    )


def functional_calls(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)
    x, target = _on(device, (5, 3), (5, 2))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (func.functional_call(model, given, (a,)) - b).square().mean()

    per_sample = func.vmap(func.grad(loss), in_dims=(None, 0, 0))(parameters, x, target)
    return (
        func.functional_call(model, {"0.bias": torch.zeros(4).double().to(device)}, x),
        func.grad(loss)(parameters, x, target), per_sample, func.jacrev(loss)(parameters, x, target),
        list(model.parameters()),
    )


def ensembles(device: str) -> Any:
    models = [nn.Linear(3, 2).double().to(device) for _ in range(3)]
    parameters, buffers = func.stack_module_state(models)
    base = nn.Linear(3, 2).double().to("meta")
    (x,) = _on(device, (4, 3))

    def call(given: Any, kept: Any, a: torch.Tensor) -> torch.Tensor:
        return func.functional_call(base, (given, kept), (a,))

    return parameters, buffers, func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)


def normalisation_without_state(device: str) -> Any:
    model = nn.BatchNorm1d(3).double().to(device)
    func.replace_all_batch_norm_modules_(model)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().to(device)
    func.replace_all_batch_norm_modules_(model)
    (x,) = _on(device, (2, 4, 3))
    return func.vmap(model)(x)


def functionalized(device: str) -> Any:
    (x,) = _on(device, (4,))

    def f(a: torch.Tensor) -> torch.Tensor:
        b = a.clone()
        b[1:].mul_(2)
        return b.t_()

    return func.functionalize(f)(x), x


def duals(device: str) -> Any:
    x, v, w = _on(device, (3,), (3,), (3, 3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        result = (dual.sin() @ w).tanh()
        primal, tangent = forward_ad.unpack_dual(result)
        nothing = forward_ad.unpack_dual(x * 2).tangent
        linear = forward_ad.unpack_dual(torch.nn.functional.linear(dual, w))
        view = forward_ad.unpack_dual(dual[1:])
        dual.mul_(3)
        written = forward_ad.unpack_dual(dual)
    return primal, tangent, nothing, linear, view, written, outcome(lambda: forward_ad.make_dual(x, v))


def duals_of_views(device: str) -> Any:
    """Rows of tensors, whose views have tangents that begin elsewhere in other storages."""
    x, v, w = _on(device, (3, 2), (4, 2), (5, 2))
    f = functools.partial(torch.nn.functional.linear, weight=w)
    return func.jvp(f, (x[0],), (v[3],)), func.jvp(lambda row: row.unsqueeze(0).mT, (x[1],), (v[0].repeat(1),))


def forward_over_reverse(device: str) -> Any:
    x, v = _on(device, (3,), (3,))
    x.requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        (grad,) = torch.autograd.grad(dual.pow(3).sum(), dual, create_graph=True)
        return forward_ad.unpack_dual(grad)


def traces(device: str) -> Any:
    (x, y) = _on(device, (3,), (3,))
    graph = make_fx(lambda a: (a + y).relu_() * 2)(x)
    return graph(x), [node.name for node in graph.graph.nodes]


def second_derivatives(device: str) -> Any:
    x, v, w = _on(device, (3,), (3,), (4, 3))
    zero = torch.zeros(3, dtype=torch.float64).to(device)
    functional = torch.autograd.functional

    def scalar(a: torch.Tensor) -> torch.Tensor:
        return (w @ a).tanh().pow(2).sum() + (a * a.flip(0)).sum()

    def steep(a: torch.Tensor) -> torch.Tensor:
        return torch.where(a > 0, a.sqrt() * 2.0, a * a).sum()

    return (
        func.hessian(scalar)(x), func.hessian(steep)(zero), func.hessian(steep)(x.abs()), func.jacfwd(steep)(zero),
        func.vmap(func.hessian(scalar))(x.expand(2, 3)), func.jvp(func.grad(scalar), (x,), (v,)),
        functional.hessian(scalar, x, vectorize=True),
        functional.hessian(scalar, x, vectorize=True, outer_jacobian_strategy="forward-mode"),
        functional.jacobian(lambda a: w @ a, x, vectorize=True, strategy="forward-mode"),
        functional.jvp(lambda a: w @ a, x, v), functional.hvp(scalar, x, v), functional.vhp(scalar, x, v),
        func.jvp(lambda a: torch.nn.functional.layer_norm(a, (3,)), (x,), (v,)),
    )


def tangents_that_are_zero(device: str) -> Any:
    options = {"dtype": torch.float64, "device": device}
    zero = torch._efficientzerotensor(3, **options)
    steep = torch.full((3,), float("inf"), dtype=torch.float64).to(device)
    wide = torch.arange(6.0, dtype=torch.float64).to(device).view(3, 2).t()
    views = zero.view(3, 1), zero[1:], zero.expand(2, 3), zero.unsqueeze(0).t(), zero.as_strided((2,), (1,))
    made = [
        zero * steep, steep * zero, zero / steep, zero / zero, steep / zero, zero + wide, wide - zero, zero - wide,
        torch.sub(zero, wide, alpha=3), torch.sub(wide, zero, alpha=3), zero + zero, torch.dot(zero, steep),
        torch.linalg.cross(zero, steep), zero.sin(), torch.cat([zero, steep]), torch.where(wide > 1, zero, wide),
        zero * 2, zero + 2, zero.double(), zero.clone(), torch.zeros_like(zero), torch.ones_like(zero), -zero,
        zero * torch.ones(3, dtype=torch.int32).to(device), zero.sum(), steep.clone().copy_(zero), *views,
        *[view * float("inf") for view in views], *[part * steep[:1] for part in zero.unbind()],
        *torch.split(zero, 2),
    ]
    refused = outcome(lambda: zero.add_(1)), outcome(zero.zero_)
    metadata = [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in made]
    return metadata, [tensor.clone() for tensor in made], refused


def copies_with_layout(device: str) -> Any:
    x, y = _on(device, (4, 5), (3,))
    like = x.t()[1:3, ::2]
    laid_out = torch.ops.aten._new_zeros_with_same_feature_meta
    return (
        [torch._lazy_clone(tensor) for tensor in (x, x.t(), x[1:, ::2], y.expand(2, 3), x[:0])],
        [laid_out(y, tensor) for tensor in (x, x.t(), y.expand(2, 3), x[:0])],
        laid_out(x, like).stride(), laid_out(x.view(2, 2, 5), x.t(), self_num_batch_dims=2),
        [tensor.to("meta").stride() for tensor in (x, x.t(), like)], x.to("meta", torch.float16).dtype,
    )


PROGRAMS = (values_within,
    vmaps, vmaps_that_write, random_vmaps, gradients, products, jacobians, functional_calls, ensembles,
    normalisation_without_state, functionalized, duals, duals_of_views, forward_over_reverse, traces,
    second_derivatives, tangents_that_are_zero, copies_with_layout,
)


@programs(*PROGRAMS)
def test_transforms_equal_eager(program: Program) -> None:
    assert_same(program)


@programs(*PROGRAMS)
def test_transforms_equal_eager_on_a_server(program: Program, server: Any) -> None:
    djinn.init(server.address)
    try:
        assert_same(program)
    finally:
        djinn.shutdown()


def test_metadata_of_a_tensor_is_not_fetched_with_its_data() -> None:
    x = torch.ones(3, device="remote_accelerator:0")
    before = djinn.stats()["materializations"]
    assert x.to("meta").shape == (3,)
    assert djinn.stats()["materializations"] == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_shortcut_is_not_taken_with_zeros_that_are_known_to_be_zero(mode: Any) -> None:
    steep = torch.full((3,), float("inf")).to("remote_accelerator:0")
    with mode():
        zero = torch._efficientzerotensor(3, device=steep.device)
        for _ in range(3):
            assert (torch.zeros_like(steep) * steep).isnan().all()
            assert (zero * steep).tolist() == [0.0, 0.0, 0.0]


def _cholesky(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(-torch.diag(a)).sum()


def _far_from_half(a: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(a, torch.full_like(a, 0.5))


@pytest.mark.parametrize("function", [_cholesky, _far_from_half])
@pytest.mark.parametrize("transform", [
    func.grad, func.jacrev, lambda f: func.jacfwd(func.grad(f)), func.hessian,
    lambda f: lambda x: func.jvp(func.grad(f), (x,), (x,)), lambda f: lambda x: func.vmap(func.grad(f))(x[None]),
    lambda f: func.grad(lambda x: func.grad(f)(x).sum())], ids=[
    "grad", "jacrev", "jacfwd of grad", "hessian", "jvp of grad", "vmap of grad", "grad of grad"])
def test_errors_below_a_transform_are_those_of_eager(transform: Any, function: Any) -> None:
    def found(device: str) -> Any:
        try:
            return transform(function)(torch.ones(3, device=device)).tolist()
        except Exception as error:
            return type(error), str(error).partition("\n")[0]

    assert found("remote_accelerator") == found("cpu")


def test_errors_of_a_pass_that_begins_at_an_ordinary_tensor_are_raised() -> None:
    def refuse(gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError("refused")

    x = torch.ones(3, device="remote_accelerator").requires_grad_()
    y = x * 2
    y.register_hook(refuse)
    with pytest.raises(KeyError, match="refused"):
        y.sum().cpu().backward()
