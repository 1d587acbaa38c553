"""Each way to call ``generate`` gives on a guarded server what it gives here, where queries share keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.generate_modes import MODES, generated, grouped_query_llama

import djinn

pytestmark = [pytest.mark.usefixtures("on_a_server"), pytest.mark.filterwarnings("ignore")]
_LEAST_MODES = 19


@pytest.fixture(scope="module")
def llama() -> Any:
    pytest.importorskip("transformers")
    return grouped_query_llama()


def test_there_are_enough_modes(llama: Any) -> None:
    assert len(MODES) >= _LEAST_MODES
    assert llama.config.num_key_value_heads < llama.config.num_attention_heads


@pytest.mark.parametrize("mode", MODES)
def test_generated_tensors_equal_eager(llama: Any, mode: str) -> None:
    wanted = generated(mode, llama, "cpu")
    got = generated(mode, llama, "remote_accelerator:0")
    home = djinn.materialize(*got) if len(got) > 1 else [djinn.materialize(*got)]
    assert len(home) == len(wanted)
    for mine, theirs in zip(home, wanted, strict=True):
        assert torch.equal(mine, theirs)
