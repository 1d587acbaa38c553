"""Tensors of one element, expanded, on a server; and kernels that take their operands to be dense.

Next to the element lie others of the same tensor, so that nothing here reaches beyond its memory, whatever is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import djinn
from djinn.ir.program import Argument, ConstantArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.transport.tcp.client import connect

DEVICE = torch.device("remote_accelerator:0")
aten = torch.ops.aten
REFUSED = "refers to a single memory location|refer to a single memory location"


class Dense:
    """Makes operands in memory of their own, here."""

    device = torch.device("cpu")

    def of(self, *size: int) -> torch.Tensor:
        numbers = torch.arange(torch.Size(size).numel(), dtype=torch.float32)
        return numbers.mul(0.37).sin().view(size).to(self.device)

    def stretched(self, value: float, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(size, value, dtype=dtype)


class Stretched(Dense):
    """Makes operands there, those that are to be stretched from the first element of a tensor.

    It has as many elements as the operand seems to have, and the others are different: a kernel that takes the operand
    to be dense keeps to its memory, and computes something else.
    """

    device = DEVICE

    def stretched(self, value: float, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        whole = torch.full((torch.Size(size).numel(),), 2 if value != 2 else 1, dtype=dtype)
        whole[0] = value
        return whole.to(DEVICE)[:1].expand(size)


def ctc(make: Dense, *, backward: bool, lengths: Callable[[list[int]], Any]) -> Any:
    log_probs, targets = make.of(600, 2, 5).log_softmax(2), make.stretched(3, 2, 512, dtype=torch.int64)
    words = lengths([600, 600]), lengths([2, 3])
    loss, alpha = aten._ctc_loss(log_probs, targets, *words)
    if not backward:
        return loss
    return aten._ctc_loss_backward(make.of(2), log_probs, targets, *words, loss, alpha, 0)


def bags(make: Dense, indices: torch.Tensor, offsets: torch.Tensor) -> Any:
    return aten._embedding_bag(make.of(7, 3), indices, offsets)[0]


def attention(make: Dense, which: str) -> Any:
    size = (1, 2, 300, 64)
    given = {name: make.stretched(0.5, *size) if name == which else make.of(*size)
             for name in ("query", "key", "value", "grad_out", "out")}
    query, key, value, grad_out = (given[name] for name in ("query", "key", "value", "grad_out"))
    made, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out = given["out"] if which == "out" else made
    return made, *aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, sums, 0.0, False)


def recurrent(make: Dense) -> Any:
    weights = [make.of(1200, 300), make.of(1200, 300), make.of(1200), make.of(1200)]
    return aten.mkldnn_rnn_layer(make.stretched(0.5, 20, 2, 300), *weights, make.of(2, 300), make.of(2, 300), False, [],
                                 2, 300, 1, True, False, False, False)[:3]


READ: dict[str, Callable[[Dense], Any]] = {
    "native_group_norm weight": lambda make: aten.native_group_norm(
        make.of(1, 4096, 1), make.stretched(0.5, 4096), None, 1, 4096, 1, 2, 1e-5),
    "native_group_norm bias": lambda make: aten.native_group_norm(
        make.of(1, 4096, 1), None, make.stretched(0.5, 4096), 1, 4096, 1, 2, 1e-5),
    **{f"native_group_norm_backward {name}": lambda make, name=name: aten.native_group_norm_backward(
        *[make.stretched(0.5, *size) if name == mine else make.of(*size) for mine, size in (
            ("grad_out", (2, 512, 9)), ("input", (2, 512, 9)), ("mean", (2, 64)), ("rstd", (2, 64)),
            ("weight", (512,)))], 2, 512, 9, 64, [True, True, True])
       for name in ("grad_out", "input", "mean", "rstd", "weight")},
    **{f"native_batch_norm_backward {name}": lambda make, name=name: aten.native_batch_norm_backward(
        *[make.stretched(0.5, *size) if name == mine else make.of(*size) for mine, size in (
            ("grad_out", (2, 512, 9)), ("input", (2, 512, 9)), ("weight", (512,)))], None, None,
        *[make.stretched(0.5, 512) if name == mine else make.of(512) for mine in ("save_mean", "save_invstd")], True,
        1e-5, [True, True, True])
       for name in ("grad_out", "input", "weight", "save_mean", "save_invstd")},
    "_weight_norm_interface v": lambda make: aten._weight_norm_interface(
        make.stretched(0.5, 64, 65), make.of(64, 1), 0),
    "_weight_norm_interface_backward grad_w": lambda make: aten._weight_norm_interface_backward(
        make.stretched(0.5, 64, 65), make.of(64, 65), make.of(64, 1), make.of(64, 1).abs() + 1, 0),
    "_ctc_loss targets": lambda make: ctc(make, backward=False, lengths=list),
    "_ctc_loss_backward targets": lambda make: ctc(make, backward=True, lengths=list),
    "_ctc_loss.Tensor targets": lambda make: ctc(make, backward=False, lengths=lambda lengths: torch.tensor(
        lengths, device=make.device)),
    "_ctc_loss_backward.Tensor targets": lambda make: ctc(make, backward=True, lengths=lambda lengths: torch.tensor(
        lengths, device=make.device)),
    "_embedding_bag indices": lambda make: bags(
        make, make.stretched(6, 2000, dtype=torch.int64), torch.arange(0, 2000, 10).to(make.device)),
    "_embedding_bag offsets": lambda make: bags(
        make, torch.arange(2000).remainder(7).to(make.device), make.stretched(0, 2000, dtype=torch.int64)),
    **{f"flash attention {name}": lambda make, name=name: attention(make, name)
       for name in ("query", "key", "value", "out", "grad_out")},
    "mkldnn_rnn_layer input": recurrent,
    "median.dim": lambda make: aten.median.dim(make.stretched(0.5, 3, 500), 1),
    "nanmedian.dim": lambda make: aten.nanmedian.dim(make.stretched(0.5, 3, 500), 1),
    **{f"adaptive_max_pool{rank}d_backward indices": lambda make, rank=rank: getattr(
        aten, f"adaptive_max_pool{rank}d_backward")(
            make.of(1, 32, *[8] * rank), make.of(1, 32, *[16] * rank),
            make.stretched(7, 1, 32, *[8] * rank, dtype=torch.int64)) for rank in (2, 3)},
}


def flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", list(READ))
def test_nothing_is_read_beside_the_element_of_a_stretched_operand(session: Any, name: str) -> None:
    with torch.no_grad():
        expected = flat(READ[name](Dense()))
        made = [tensor.cpu() for tensor in flat(READ[name](Stretched()))]
    for mine, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def optimizer(name: str, stretched: str) -> Callable[[Dense], Any]:
    states = {"_fused_sgd_": ["momentum_buffer_list"], "_fused_adagrad_": ["state_sums"]}.get(
        name, ["exp_avgs", "exp_avg_sqs"])
    words = {
        "_fused_sgd_": {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False,
                        "maximize": False, "is_first_step": False},
        "_fused_adagrad_": {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False},
    }.get(name, {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
                 "maximize": False})

    def run(make: Dense) -> Any:
        lists = [[make.stretched(0.5, 2000) if stretched in (mine, "all") else make.of(2000)]
                 for mine in ("self", "grads", *states)]
        more = [] if name == "_fused_sgd_" else [torch.ones((), device=make.device)]
        rest = [] if name == "_fused_sgd_" else [[], more] if len(states) == 2 else [more]
        getattr(aten, name)(*lists, *rest, **words)
        return lists[0][0]

    return run


WRITTEN: dict[str, Callable[[Dense], Any]] = {
    "rrelu_with_noise": lambda make: aten.rrelu_with_noise(
        -make.of(2000).abs(), make.stretched(1.0, 2000), 0.125, 0.125, True),
    "rrelu_with_noise_": lambda make: aten.rrelu_with_noise_(
        -make.of(2000).abs(), make.stretched(1.0, 2000), 0.125, 0.125, True),
    **{f"{name} {what}": optimizer(name, what) for name in (
        "_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_") for what in ("self", "grads", "all")},
    "index_put_": lambda make: aten.index_put_(
        make.stretched(1.0, 2000), [torch.arange(5).to(make.device)], make.of(5)),
    "add_": lambda make: aten.add_(make.stretched(1.0, 2000), 1),
    "native_batch_norm running_mean": lambda make: aten.native_batch_norm(
        make.of(2, 512, 9), None, None, make.stretched(0.5, 512), make.of(512), True, 0.1, 1e-5),
    "sort.values out": lambda make: aten.sort.values(
        make.of(2000), 0, False, values=make.stretched(0.0, 2000), indices=torch.zeros(2000, dtype=torch.int64).to(
            make.device)),
}


@pytest.mark.parametrize("name", list(WRITTEN))
def test_what_overlaps_itself_is_not_written(session: Any, name: str) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=REFUSED):
        djinn.materialize(flat(WRITTEN[name](Stretched())))


@pytest.mark.parametrize("layout", ["gaps", "transposed", "channels_last"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_write_parameters_as_they_lie(session: Any, name: str, layout: str) -> None:
    def after(device: str | torch.device, *, fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        whole = torch.randn(2, 6, 4, 4).to(device)
        part = {"gaps": whole[:, ::2], "transposed": whole.transpose(0, 1),
                "channels_last": whole.contiguous(memory_format=torch.channels_last)}[layout]
        parameter = part.requires_grad_()
        chosen = getattr(torch.optim, name)([parameter], lr=0.1, fused=fused)
        for _ in range(3):
            chosen.zero_grad()
            parameter.pow(2).sum().backward()
            chosen.step()
        return [parameter.detach().cpu(), whole.detach().cpu()]

    for mine, theirs in zip(after(DEVICE, fused=True), after("cpu", fused=False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_operands_that_are_written_and_read_at_once(session: Any) -> None:
    """Written in its own range: a kernel could write over indices that it has checked."""
    numbers = torch.arange(8).to(DEVICE)
    result, _ = torch.cummax(numbers[:4], 0, out=(numbers[2:6], torch.zeros(4, dtype=torch.int64).to(DEVICE)))
    assert result.cpu().tolist() == [0, 1, 2, 3]
    assert numbers.cpu().tolist() == [0, 1, 0, 1, 2, 3, 6, 7]


def test_a_copy_that_would_take_too_much_is_refused(session: Any) -> None:
    stretched = torch.ones(1).to(DEVICE).expand(2**40)
    with pytest.raises(djinn.DjinnError, match=str(2**42)):
        torch.ops.aten.median(stretched).cpu()


def program(steps: list[tuple[str, tuple[Argument, ...], tuple[int, ...], int]], inputs: int, keep: int) -> Program:
    templates = tuple(
        Template(name, facts_of(operator_named(name)).digest, arguments) for name, arguments, _, _ in steps)
    return Program(templates, tuple(Step(index, operands, results) for index, (_, _, operands, results) in enumerate(
        steps)), inputs, (keep,))


TENSOR, NUMBER, NOTHING = TensorArgument(), NumberArgument(), ConstantArgument(None)
FIRST = [("aten::slice.Tensor", (TENSOR, NUMBER, NUMBER, NUMBER, NUMBER), (-2,), 1),
        ("aten::expand", (TENSOR, NUMBER), (0,), 1)]
SIZE = 256


def asked(address: str, body: Program, operand: torch.Tensor, numbers: list[Any]) -> tuple[Any, torch.Tensor, Any]:
    """Run a program with an operand and the first element of another, expanded; fetch a result and the other one."""
    opened = connect(address, ConnectOptions())
    whole = torch.full((SIZE,), 7.0)
    whole[0] = 0.5
    values = [operand, whole]
    opened.request(Batch([*[Upload(handle, header_of(value)) for handle, value in enumerate(values, 100)],
                          Define(1, body)], synchronize=True), values)
    result, _ = opened.request(Batch([Run(1, (100, 101), [0, 0, 1, 1, [SIZE], *numbers], (200,))], describe=(200,)), ())
    _, made = opened.request(Batch(fetch=(101,) if result.failures else (101, 200)), ())
    opened.close()
    return result.failures, made[0], made[1:]


def test_what_lies_beside_an_element_is_not_read(start_server: Any) -> None:
    body = program([*FIRST, ("aten::native_group_norm", (TENSOR, NOTHING, TENSOR, *[NUMBER] * 5), (-1, 1), 3)], 2, 2)
    failures, _, made = asked(start_server().address, body, torch.zeros(1, SIZE, 1), [1, SIZE, 1, 1, 1e-5])
    assert not failures
    assert torch.equal(made[0], torch.full((1, SIZE, 1), 0.5))


def test_what_lies_beside_an_element_is_not_written(start_server: Any) -> None:
    arguments = (TENSOR, TENSOR, NUMBER, NUMBER, ConstantArgument(True))
    body = program([*FIRST, ("aten::rrelu_with_noise", arguments, (-1, 1), 1)], 2, 2)
    failures, whole, _ = asked(start_server().address, body, -torch.ones(SIZE), [0.125, 0.125])
    assert [failure.kind for failure in failures] == ["RuntimeError"]
    assert whole.tolist() == [0.5, *[7.0] * (SIZE - 1)]
