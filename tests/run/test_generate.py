"""Each way to call ``generate`` gives on a guarded server what it gives here, where queries share keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.generate_modes import MODES, generated, grouped_query_llama

import djinn
from djinn_plugins.run.accelerator.libraries import replacements
from djinn_plugins.run.replacing import replaced
from djinn_plugins.run.report import RunReport

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


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_caches_are_offloaded_in_the_default_mode_of_a_run(llama: Any, cache: str) -> None:
    tokens = torch.tensor([[3, 5, 7, 11]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = llama.to("cpu").generate(tokens, **options)
    with replaced(replacements(torch.device("remote_accelerator:0")), RunReport()):
        model = llama.to("remote_accelerator:0")
        got = model.generate(tokens.to("remote_accelerator:0"), cache_implementation=cache, **options)
    assert got.tolist() == wanted.tolist()
