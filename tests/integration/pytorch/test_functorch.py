"""``torch.func`` and forward-mode differentiation, alone and nested."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from eager_support import Program, assert_same, outcome, programs
from torch import func, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx


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


@programs(
    vmaps, vmaps_that_write, random_vmaps, gradients, products, jacobians, functional_calls, ensembles,
    normalisation_without_state, functionalized, duals, forward_over_reverse, traces,
)
def test_transforms_equal_eager(program: Program) -> None:
    assert_same(program)
