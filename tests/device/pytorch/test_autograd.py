"""Autograd as people use it: hooks, custom functions, checkpointing, anomaly mode, higher orders, grad modes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import djinn


def _leaf(device: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(size or (3, 4)), dtype=dtype).to(device).requires_grad_()


def tensor_hooks(device: str) -> Any:
    x = _leaf(device)
    seen: list[torch.Tensor] = []
    handle = x.register_hook(lambda grad: seen.append(grad) or grad * 2)
    middle = x.sin()
    middle.register_hook(lambda grad: grad.clamp(max=0.5))
    middle.retain_grad()
    (middle * 3).sum().backward()
    first = x.grad.clone()
    handle.remove()
    x.cos().sum().backward()
    return seen, first, x.grad, middle.grad


def node_hooks(device: str) -> Any:
    x = _leaf(device)
    y = x.tanh()
    node = y.grad_fn
    calls: list[Any] = []
    node.register_prehook(lambda outputs: calls.append(("before", outputs)) or (outputs[0] * 2,))
    node.register_hook(lambda inputs, outputs: calls.append(("after", inputs, outputs)) or (inputs[0] + 1,))
    y.sum().backward()
    return calls, x.grad, node.name(), [type(n[0]).__name__ for n in node.next_functions]


def post_accumulate_hooks(device: str) -> Any:
    model = nn.Linear(3, 2).to(device)
    steps: list[torch.Tensor] = []

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            steps.append(parameter.grad.clone())
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(torch.ones(4, 3).to(device)).square().mean().backward()
    return steps, list(model.parameters()), [p.grad for p in model.parameters()]


def multi_grad_hook(device: str) -> Any:
    x, y = _leaf(device), _leaf(device)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((x, y), seen.append)
    (x * y).sum().backward()
    return seen


def module_hooks(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda _, args, output: seen.append(output) or output + 1)
    model[2].register_full_backward_hook(lambda _, inputs, outputs: seen.append((inputs, outputs)))
    model[0].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 3,))
    x = _leaf(device, 5, 3)
    model(x).sum().backward()
    return seen, x.grad, [p.grad for p in model.parameters()]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> Any:
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power, "no tensor", power

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1), None


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.add_(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad * 2


class Split(torch.autograd.Function):
    """With ``setup_context``, unused outputs, integers, and gradients that need not be materialized."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * y, x.argmax(-1), y.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[2])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any, grad_exp: Any) -> Any:
        x, y, exp = ctx.saved_tensors
        grad_x = None if grad is None else grad * y
        grad_y = None if grad is None else grad * x
        if grad_exp is not None:
            grad_y = grad_exp * exp if grad_y is None else grad_y + grad_exp * exp
        return grad_x, grad_y


def custom_function(device: str) -> Any:
    x = _leaf(device)
    y, text, number = Cube.apply(x, 3)
    y.sum().backward()
    return y, text, number, x.grad


def custom_function_in_place(device: str) -> Any:
    leaf, y = _leaf(device), _leaf(device)
    x = leaf * 1
    z = AddInPlace.apply(x, y)
    z.square().sum().backward()
    return z is x, x, leaf.grad, y.grad, outcome(lambda: AddInPlace.apply(leaf, y))


def custom_function_with_setup_context(device: str) -> Any:
    x, y = _leaf(device), _leaf(device)
    product, index, exp = Split.apply(x, y)
    product.sum().backward()
    first = (x.grad.clone(), y.grad.clone(), index.requires_grad)
    _, _, exp = Split.apply(x, y)
    exp.sum().backward()
    batched = torch.func.vmap(torch.func.grad(lambda a, b: Split.apply(a, b)[0].sum()))(x.detach(), y.detach())
    return product, index, first, x.grad, y.grad, batched


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 5


def once_differentiable(device: str) -> Any:
    x = _leaf(device)
    (grad,) = torch.autograd.grad(OnceDifferentiable.apply(x).sum(), x, create_graph=True)
    return grad.detach(), outcome(lambda: torch.autograd.grad(grad.sum(), x))


class WrongCount(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad


class WrongShape(WrongCount):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad[:1]


class Raises(WrongCount):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise KeyError("in backward")


def custom_functions_that_are_wrong(device: str) -> Any:
    x = _leaf(device)
    return [outcome(lambda f=f: f.apply(x).sum().backward()) for f in (WrongCount, WrongShape, Raises)]


def _block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((x @ w).relu(), 0.5) * x


def checkpointing(device: str, *, use_reentrant: bool) -> Any:
    x, w = _leaf(device, 4, 4), _leaf(device, 4, 4)
    torch.manual_seed(1)
    y = checkpoint(_block, x, w, use_reentrant=use_reentrant)
    z = checkpoint(_block, y, w, use_reentrant=use_reentrant)
    z.sum().backward()
    return z, x.grad, w.grad


def checkpointing_reentrant(device: str) -> Any:
    return checkpointing(device, use_reentrant=True)


def checkpointing_not_reentrant(device: str) -> Any:
    return checkpointing(device, use_reentrant=False)


def checkpointing_sequential(device: str) -> Any:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).to(device)
    x = _leaf(device, 2, 3)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


def selective_checkpointing(device: str) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = _leaf(device, 4, 4), _leaf(device, 4, 4)
    torch.manual_seed(1)
    y = checkpoint(_block, x, w, use_reentrant=False,
                   context_fn=lambda: create_selective_checkpoint_contexts(policy))
    y.sum().backward()
    return y, x.grad, w.grad


def higher_orders(device: str) -> Any:
    x = _leaf(device, 4, dtype=torch.float64)
    y = (x**4).sum()
    orders = []
    for _ in range(4):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        orders.append(y)
    (x.grad,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
    x.grad.sum().backward()
    return orders, x.grad


def gradient_penalty(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    x = _leaf(device, 5, 3)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((grad.norm(2, dim=1) - 1) ** 2).mean().backward()
    return grad, [p.grad for p in model.parameters()]


def saved_tensors_hooks(device: str) -> Any:
    packed: list[Any] = []

    def pack(x: torch.Tensor) -> Any:
        packed.append(x.shape)
        return x.cpu()

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x.to(device)

    x = _leaf(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = (x.exp() * x).sum()
    y.backward()
    first = x.grad.clone()
    with torch.autograd.graph.save_on_cpu():
        y = (x.sin() * x).sum()
    y.backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        refused = outcome(lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack).__enter__())
    return packed, first, x.grad, refused


def raw_saved_tensors(device: str) -> Any:
    x = _leaf(device)
    y = x.exp() * 2
    node = y.grad_fn.next_functions[0][0]
    return node._saved_result, node._raw_saved_result is not None, outcome(lambda: y.grad_fn._saved_other)


def grad_modes(device: str) -> Any:
    x = _leaf(device)
    results: list[Any] = []
    with torch.no_grad():
        y = x * 2
        results.append((y.requires_grad, y.is_leaf))
        with torch.enable_grad():
            results.append((x * 2).requires_grad)
    with torch.inference_mode():
        z = x * 2
        results += [z.is_inference(), z.requires_grad]
        z.add_(1)
    results.append(outcome(lambda: z.add_(1)))
    results.append(outcome(lambda: (x * z).sum().backward()))
    results.append(outcome(z.requires_grad_))
    with torch.set_grad_enabled(False):
        results.append((x + 1).requires_grad)

    @torch.no_grad()
    def decorated() -> bool:
        return (x + 1).requires_grad

    results.append(decorated())
    results.append(outcome(lambda: x.add_(1)))
    results.append(outcome(lambda: x[0].add_(1)))
    results.append(outcome(lambda: torch.ones(2, dtype=torch.int64, device=device).requires_grad_()))
    return results


def retained_graphs(device: str) -> Any:
    x = _leaf(device)
    y = x.exp().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    return first, x.grad, outcome(y.backward), outcome(lambda: x.exp().backward())


def several_roots(device: str) -> Any:
    x, w = _leaf(device), _leaf(device)
    a, b = (x * w).sin(), (x + w).sum()
    torch.autograd.backward([a, b], [torch.ones_like(a), None], inputs=[x])
    grads = torch.autograd.grad([(x * 2).sum(), w.cos()], [x, w], [None, torch.full_like(w, 3.0)])
    unused = torch.autograd.grad((x * 2).sum(), [x, w], allow_unused=True)
    zeros = torch.autograd.grad((x * 2).sum(), [x, w], allow_unused=True, materialize_grads=True)
    return x.grad, w.grad, grads, unused, zeros, outcome(lambda: torch.autograd.grad((x * 2).sum(), [x, w]))


def batched_gradients(device: str) -> Any:
    x = _leaf(device, 3)
    y = x.sin() * x
    return torch.autograd.grad(y, x, torch.eye(3).to(device), is_grads_batched=True)


def views_and_writes(device: str) -> Any:
    x = _leaf(device, 4, 4)
    y = x * 2
    view = y[1:3, ::2]
    view.mul_(view.detach() + 1)
    y[0] = y[3] * 5
    y.t()[2].add_(y[0].detach())
    z = y.view(2, 8).select(0, 1).exp()
    base = view._base is y
    z.sum().backward()
    return y, z, x.grad, view, base, y._version, view._version


def writes_that_autograd_refuses(device: str) -> Any:
    x = _leaf(device, 4)
    y = x.exp()
    z = y.sum()
    y.add_(1)
    a = (x * 1).unbind()
    with torch.no_grad():
        made_without = x[1:]
    return [
        outcome(z.backward),
        outcome(lambda: a[0].add_(1)),
        outcome(lambda: made_without.add_(1)),
        outcome(lambda: x.expand(2, 4).clone().t_().add_(1)),
        outcome(lambda: (x * 1).split(2)[0].mul_(2)),
        outcome(lambda: setattr(x, "requires_grad", False)),
        outcome(lambda: setattr(y, "requires_grad", False)),
        outcome(lambda: setattr(x, "grad", torch.ones(3, device=device))),
        outcome(lambda: setattr(x, "grad", torch.ones(4, device=device, dtype=torch.float64))),
        outcome(lambda: y.grad_fn is None),
        outcome(lambda: x.detach_().requires_grad),
    ]


def functional(device: str) -> Any:
    from torch.autograd import functional as f

    def square(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum(-1)

    x, v = torch.randn(2, 3).to(device), torch.randn(2, 3).to(device)
    return (
        f.jacobian(square, x), f.jacobian(square, x, vectorize=True, strategy="forward-mode"),
        f.hessian(lambda t: (t**3).sum(), x), f.hessian(lambda t: (t**3).sum(), x, vectorize=True),
        f.vjp(square, x, torch.ones(2).to(device)), f.jvp(square, x, v), f.hvp(lambda t: (t**3).sum(), x, v),
        f.vhp(lambda t: (t**3).sum(), x, v), f.jacobian(lambda a, b: a * b, (x, v), create_graph=True),
    )


def gradcheck(device: str) -> Any:
    x, w = _leaf(device, 2, 3, dtype=torch.float64), _leaf(device, 3, 2, dtype=torch.float64)
    return (
        torch.autograd.gradcheck(lambda a, b: (a @ b).tanh(), (x, w)),
        torch.autograd.gradcheck(lambda a, b: (a @ b).tanh(), (x, w), check_forward_ad=True, check_batched_grad=True),
        torch.autograd.gradgradcheck(lambda a, b: (a @ b).tanh(), (x, w)),
        torch.autograd.gradcheck(lambda a: a.sin(), (x,), fast_mode=True),
        outcome(lambda: torch.autograd.gradcheck(WrongFactor.apply, (x,))),
    )


class WrongFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def accumulating_and_clearing(device: str) -> Any:
    model = nn.Linear(3, 2).to(device)
    x = torch.ones(1, 3).to(device)
    for _ in range(3):
        (model(x).sum() / 3).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    zeros = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads, zeros, [p.grad for p in model.parameters()]


def complex_gradients(device: str) -> Any:
    x = _leaf(device, 3, dtype=torch.complex64)
    (x * x.conj()).real.sum().backward()
    first = x.grad.clone()
    torch.view_as_real(x).square().sum().backward()
    return first, x.grad, outcome(lambda: (x * 2).sum().backward())


def graph_inspection(device: str) -> Any:
    x = _leaf(device)
    y = (x * 2).relu().sum()
    edge = torch.autograd.graph.get_gradient_edge(y)
    names = []
    node: Any = y.grad_fn
    while node is not None:
        names.append((node.name(), node._sequence_nr() >= 0, len(node.metadata)))
        node = node.next_functions[0][0] if node.next_functions else None
    (grad,) = torch.autograd.grad(torch.autograd.graph.get_gradient_edge(y), x)
    return names, edge.output_nr, grad


def numbers_of_versions(device: str) -> Any:
    x = torch.zeros(3, device=device)
    y = x.detach()
    x.add_(1)
    y.mul_(2)
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.add_(1)
    return x._version, y._version, x.data._version


@programs(
    tensor_hooks, node_hooks, post_accumulate_hooks, multi_grad_hook, module_hooks, custom_function,
    custom_function_in_place, custom_function_with_setup_context, once_differentiable, custom_functions_that_are_wrong,
    checkpointing_reentrant, checkpointing_not_reentrant, checkpointing_sequential, selective_checkpointing,
    higher_orders, gradient_penalty, saved_tensors_hooks, raw_saved_tensors,
    grad_modes, retained_graphs, several_roots, batched_gradients, views_and_writes,
    writes_that_autograd_refuses, functional, gradcheck, accumulating_and_clearing, complex_gradients,
    graph_inspection, numbers_of_versions,
)
def test_autograd_equals_eager(program: Program) -> None:
    assert_same(program)


@pytest.mark.parametrize("device", ["cpu", "remote_accelerator:0"])
def test_anomaly_mode_finds_the_operation(device: str) -> None:
    x = torch.tensor([0.0, 1.0]).to(device).requires_grad_()
    with warnings.catch_warnings(record=True) as seen, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        x.sin().sum().backward()
        y = x.sqrt().mul(0).sum()
        with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values in its 0th output"):
            y.backward()
    messages = [str(warning.message) for warning in seen]
    assert any("Error detected in SqrtBackward0. Traceback of forward call" in text and "x.sqrt()" in text
               for text in messages), messages


def test_backward_itself_costs_no_round_trip() -> None:
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    (x @ x).tanh().sum().backward()
    djinn.synchronize()
    djinn.reset_stats()
    x.grad = None
    (x @ x).tanh().sum().backward()
    assert djinn.stats()["round_trips"] == 0
