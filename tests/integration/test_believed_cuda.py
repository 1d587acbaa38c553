"""What a client records for a CUDA executor, run by a guarded server: none of it may be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recording.believed_cuda import believed_cuda
from torch import nn

import djinn

D = "remote_accelerator:0"
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN}
SHAPES = ({}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False})


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
    names = [node.operation for node in captured.graph.nodes()]
    assert sum("lstm" in name or "gru" in name or "rnn_tanh" in name for name in names) == 1, names


@pytest.mark.parametrize("settings", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_trained(server: Any, kind: str, settings: dict[str, bool]) -> None:
    layers, sequence = made(kind, **settings)
    layers(sequence)[0].square().sum().backward()
    wanted = [parameter.grad for parameter in layers.parameters()]
    layers, sequence = made(kind, **settings)
    with believed_cuda(server=server.address):
        layers.to(D)(sequence.to(D))[0].square().sum().backward()
        for parameter, gradient in zip(layers.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.cpu(), gradient)


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
