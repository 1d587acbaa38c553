"""What a client records for a CUDA executor, run by a guarded server: none of it may be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recording.believed_cuda import believed_cuda
from torch import nn

import djinn
from djinn_plugins.common.operators.recurrent import GRU, recurrent_operators

D = "remote_accelerator:0"
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN}
SHAPES = ({}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False})


LAYER = ("lstm", "gru", "rnn_tanh", "recurrent_packed")


def names_in(captured: Any) -> list[str]:
    return [node.operation for node in captured.graph.nodes()]


def layers_in(captured: Any) -> int:
    return sum(name.rpartition("::")[2].partition(".")[0] in LAYER for name in names_in(captured))


def made(kind: str, **settings: bool | int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return KINDS[kind](6, 5, **settings), torch.randn(4, 3, 6)


@pytest.mark.parametrize("settings", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_recorded_whole_without_gradients(
    server: Any, kind: str, settings: dict[str, bool]
) -> None:
    layers, sequence = made(kind, **settings)
    with torch.no_grad():
        wanted, last = layers(sequence)
        with believed_cuda(server=server.address):
            with djinn.capture(modules=False) as captured:
                got, got_last = layers.to(D)(sequence.to(D))
            assert got.stride() == wanted.stride()
            torch.testing.assert_close(got.cpu(), wanted)
            for have, want in zip(*(state if kind == "lstm" else (state,) for state in (got_last, last)), strict=True):
                torch.testing.assert_close(have.cpu(), want)
    assert layers_in(captured) == 1, names_in(captured)


@pytest.mark.parametrize("settings", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_trained_by_one_operation_each_way(
    server: Any, kind: str, settings: dict[str, bool]
) -> None:
    def gradients(layers: nn.Module, sequence: torch.Tensor) -> list[torch.Tensor]:
        leaf = sequence.detach().requires_grad_()
        output, last = layers(leaf)
        (output.square().sum() + sum(state.sin().sum() for state in (last if kind == "lstm" else (last,)))).backward()
        found = [leaf.grad, *(parameter.grad for parameter in layers.parameters())]
        return [gradient for gradient in found if gradient is not None]

    wanted = gradients(*made(kind, **settings))
    layers, sequence = made(kind, **settings)
    with believed_cuda(server=server.address):
        with djinn.capture(modules=False) as captured:
            got = gradients(layers.to(D), sequence.to(D))
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one.cpu(), other)
    names = names_in(captured)
    assert (layers_in(captured), names.count("djinn::recurrent_backward")) == (1, 1), names


def test_a_new_length_costs_no_round_trip(server: Any) -> None:
    layers = nn.LSTM(6, 5)
    with believed_cuda(server=server.address):
        layers.to(D)
        layers(torch.randn(2, 3, 6, device=D))[0].sum().backward()
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        before = djinn.stats()["round_trips"]
        for length in range(3, 9):
            layers(torch.randn(length, 3, 6, device=D))[0].sum().backward()
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        assert djinn.stats()["round_trips"] - before == 1


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_computed_and_trained_whole(server: Any, kind: str) -> None:
    layers, batch = made(kind, num_layers=2)

    def results(device: str) -> list[torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(batch, torch.tensor([4, 2, 1])).to(device)
        layers.to(device).zero_grad(set_to_none=True)
        output, last = layers(packed)
        output.data.square().sum().backward()
        return [output.data, *(last if kind == "lstm" else (last,)),
                *(parameter.grad for parameter in layers.parameters() if parameter.grad is not None)]

    wanted = [tensor.detach().clone() for tensor in results("cpu")]
    with believed_cuda(server=server.address):
        with djinn.capture(modules=False) as captured:
            got = [tensor.detach() for tensor in results(D)]
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other)
    names = names_in(captured)
    assert (names.count("djinn::recurrent_packed"), names.count("djinn::recurrent_backward")) == (1, 1), names


def test_layers_that_do_not_train_have_no_backward_pass_as_with_cudnn(server: Any) -> None:
    layers, sequence = made("gru")
    with believed_cuda(server=server.address):
        layers.to(D).eval()(sequence.to(D))[0].sum().backward()
        with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
            next(layers.parameters()).grad.cpu()  # type: ignore[union-attr]  # the backward pass has made it


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_drawn_from_the_sessions_numbers(server: Any, kind: str, is_packed: bool) -> None:
    layers, sequence = made(kind, num_layers=3, bidirectional=True)
    layers.dropout = 0.5

    def results(device: str) -> list[torch.Tensor]:
        given: Any = sequence.to(device)
        if is_packed:
            given = nn.utils.rnn.pack_padded_sequence(sequence, torch.tensor([4, 2, 1])).to(device)
        layers.to(device).zero_grad(set_to_none=True)
        torch.manual_seed(7)
        output, last = layers(given)
        data = output.data if is_packed else output
        data.square().sum().backward()
        return [data, *(last if kind == "lstm" else (last,)),
                *(parameter.grad for parameter in layers.parameters() if parameter.grad is not None)]

    # Local PyTorch draws on a CPU as on a session whose executor has one.
    wanted = [tensor.detach().clone() for tensor in results("cpu")]
    with believed_cuda(server=server.address):
        with djinn.capture(modules=False) as captured:
            got = [tensor.detach() for tensor in results(D)]
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other)
    assert (layers_in(captured), names_in(captured).count("djinn::recurrent_backward")) == (3, 3), names_in(captured)


def test_a_guard_refuses_gradients_of_another_size(server: Any) -> None:
    operators = recurrent_operators()
    layers, sequence = made("gru")
    with believed_cuda(server=server.address), torch.no_grad():
        params = [parameter.detach() for parameter in layers.to(D).parameters()]
        state, gradient = torch.zeros(1, 3, 5, device=D), torch.zeros(4, 3, 4, device=D)
        with pytest.raises(RuntimeError, match="gradients of the sizes"):
            operators.backward([gradient, state], sequence.to(D), [], [state], params, GRU, True, 1, True, False,
                               False)[0].cpu()
        with pytest.raises(RuntimeError, match="the sizes of batches"):
            operators.packed(sequence.to(D).view(12, 6), [4, 5, 3], [state], params, GRU, True, 1, True, False)[0].cpu()


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_and_packed_sequences(server: Any, cell: type[nn.Module]) -> None:
    torch.manual_seed(0)
    one, layers, batch = cell(6, 5), nn.GRU(6, 5), torch.randn(4, 3, 6)
    packed = nn.utils.rnn.pack_padded_sequence(batch, torch.tensor([4, 2, 1]))
    wanted, state = one(batch[0]), layers(packed)[1]
    with believed_cuda(server=server.address):
        got = one.to(D)(batch[0].to(D))
        for have, want in zip(got if isinstance(got, tuple) else (got,),
                              wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            torch.testing.assert_close(have.cpu(), want)
        torch.testing.assert_close(layers.to(D)(packed.to(D))[1].cpu(), state)


def test_autocast_computes_recurrent_layers_in_its_precision(server: Any) -> None:
    layers, sequence = made("lstm")
    with believed_cuda(server=server.address), torch.no_grad(), torch.autocast("remote_accelerator", torch.bfloat16):
        got, _ = layers.to(D)(sequence.to(D))
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float().cpu(), layers.cpu()(sequence)[0], rtol=0.05, atol=0.02)
