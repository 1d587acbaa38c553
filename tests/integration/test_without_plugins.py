"""The kernel's own backend is enough for one executor: a guarded server, and none of the plugins around backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import djinn
from djinn.errors import ConfigurationError, PluginError

pytestmark = [pytest.mark.usefixtures("on_a_server"), pytest.mark.filterwarnings("ignore")]
_BACKEND_PLUGINS = ("djinn-backend-fleet", "djinn-backend-replay", "djinn-cache-results", "djinn-planning",
                    "djinn-wire-delta")
_SMALL = {"vocab_size": 96, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}
_PROMPT = torch.tensor([[64, 33, 18, 25, 4]])


@pytest.fixture(autouse=True)
def _sessions_of_its_own() -> Iterator[None]:
    djinn.shutdown()
    yield
    djinn.shutdown()


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    pytest.importorskip("transformers")
    from support.models.gpt2 import generated, gpt2

    tokens = generated(gpt2(**_SMALL), _PROMPT, 12)
    assert len(tokens.unique()) > 6, "a model that repeats itself shows nothing"
    return tokens


def _generated_without(*plugins: str) -> torch.Tensor:
    from support.models.gpt2 import generated, gpt2

    djinn.init(plugins=[f"-{name}" for name in plugins])
    return generated(gpt2(**_SMALL).to("remote_accelerator:0"), _PROMPT.to("remote_accelerator:0"), 12)



def test_gpt2_generates_without_any_of_them(expected: torch.Tensor) -> None:
    assert torch.equal(_generated_without(*_BACKEND_PLUGINS), expected)


@pytest.mark.parametrize("plugin", _BACKEND_PLUGINS)
def test_gpt2_generates_without_one_of_them(plugin: str, expected: torch.Tensor) -> None:
    assert torch.equal(_generated_without(plugin), expected)


def test_a_small_training_run_equals_eager_without_any_of_them() -> None:
    def weights(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for batch in torch.arange(60.0).reshape(5, 2, 6).div(30).unbind():
            optimizer.zero_grad()
            model(batch.to(device)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    djinn.init(plugins=[f"-{name}" for name in _BACKEND_PLUGINS])
    assert all(map(torch.equal, weights("remote_accelerator:0"), weights("cpu")))


@pytest.mark.parametrize(("plugin", "settings", "error", "said"), [
    ("djinn-backend-fleet", {"servers": ["local://", "local://"]}, PluginError, "There is no backend"),
    ("djinn-backend-replay", {"recovery": "replay"}, ConfigurationError, "needs the plugin djinn-backend-replay"),
    ("djinn-cache-results", {"result_cache_bytes": 2**20}, PluginError, "There is no cache"),
])
def test_a_setting_that_needs_a_plugin_names_it(
    plugin: str, settings: dict[str, Any], error: type[Exception], said: str,
) -> None:
    with pytest.raises(error, match=said) as raised:
        djinn.init(plugins=[f"-{plugin}"], **settings)
    assert plugin in str(raised.value)
    djinn.init()
    assert torch.ones(2, device="remote_accelerator:0").sum().item() == 2
