"""Each test compiles anew, in a session of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import djinn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    djinn.init()
    # Without this, Dynamo leaves recurrent modules to eager.
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    djinn.shutdown()
    torch._dynamo.reset()
