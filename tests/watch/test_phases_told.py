"""What a client says its work is part of, without being asked: servers let those go first that write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn.session import runtime
from djinn.session.programs import MAX_SILENT
from djinn.wire.messages import Batch
from djinn_plugins.device.classifier.classifier import CoreClassifier

DEVICE = "remote_accelerator:0"
DECODE, UNKNOWN = ExecutionPhase.LLM_DECODE, ExecutionPhase.UNKNOWN
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def whole(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def by_hand(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return ((query @ keys.transpose(-1, -2)) / math.sqrt(query.shape[-1])).softmax(-1) @ values


@pytest.fixture
def told() -> Iterator[list[ExecutionPhase]]:
    """Phases of the messages that a session sends, as its server understands them."""
    djinn.init()
    connection: Any = runtime.current().backend.executors[0].connection
    phases: list[ExecutionPhase] = []
    latest = UNKNOWN
    submit, request = connection.submit, connection.request

    def note(send: Any) -> Any:
        def sent(batch: Batch, tensors: Any) -> Any:
            nonlocal latest
            assert batch.phase is not latest, "what is known is not told again"
            latest = latest if batch.phase is None else batch.phase
            phases.append(latest)
            return send(batch, tensors)
        return sent

    connection.submit, connection.request = note(submit), note(request)
    yield phases
    djinn.shutdown()


@pytest.mark.parametrize("attention", [whole, by_hand])
def test_reading_and_writing_are_told_by_the_sizes_of_attention(
    told: list[ExecutionPhase], attention: Attention,
) -> None:
    model = torch.nn.Linear(16, 16).to(DEVICE)
    cache = torch.randn(1, 4, 32, 16).to(DEVICE)
    with torch.no_grad():
        attention(cache, cache, cache).sum().item()
        assert set(told) == {UNKNOWN}, "a prompt is read"
        told.clear()
        for _ in range(3):
            new = model(torch.randn(1, 4, 1, 16).to(DEVICE))
            cache = torch.cat([cache, new], 2)
            attention(new, cache, cache).sum().item()
        assert told[-1] is DECODE
        told.clear()
        model(cache).sum().item()
        assert set(told) == {DECODE}, "what gives nothing away is part of what was before it"
        told.clear()
        attention(cache, cache, cache).sum().item()
        assert told[-1] is UNKNOWN
        attention(cache[:, :, :1], cache, cache).sum().item()
        assert told[-1] is DECODE
        for count in range(MAX_SILENT + 1):  # each is another number: none is answered from memory
            model(cache + count).sum().item()
        assert told[-1] is UNKNOWN, "but not for ever"


@pytest.mark.parametrize(("operator", "sizes", "phase"), [
    (torch.ops.aten._softmax.default, [(1, 8, 1, 40)], DECODE),
    (torch.ops.aten._softmax.default, [(1, 8, 8, 40)], DECODE),
    (torch.ops.aten._softmax.default, [(1, 8, 9, 40)], UNKNOWN),
    (torch.ops.aten._softmax.default, [(1, 8, 1, 1)], UNKNOWN),
    (torch.ops.aten._softmax.default, [(8, 50000)], UNKNOWN),
    (torch.ops.aten.scaled_dot_product_attention.default, [(1, 8, 1, 64), (1, 8, 40, 64), (1, 8, 40, 64)], DECODE),
    (torch.ops.aten.scaled_dot_product_attention.default, [(1, 8, 40, 64), (1, 8, 40, 64), (1, 8, 40, 64)], UNKNOWN),
    (torch.ops.aten.scaled_dot_product_attention.default, [(1, 8, 1, 64)], UNKNOWN),
])
def test_what_sizes_tell(operator: Any, sizes: list[tuple[int, ...]], phase: ExecutionPhase) -> None:
    classifier = CoreClassifier()
    assert classifier.reveals_phase(operator)
    assert classifier.phase_of(operator, sizes) is phase
    assert not classifier.reveals_phase(torch.ops.aten.add.Tensor)
