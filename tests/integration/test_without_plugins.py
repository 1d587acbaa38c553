"""Guarded servers and their clients without the plugins around backends, connections and memory.

The kernel's own backend is enough for one executor, and a server needs a memory manager only for a memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from support.processes.warm import run_djinn

import djinn
from djinn.errors import ConfigurationError, DjinnError, PluginError
from djinn_plugins.server.limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile

pytestmark = [pytest.mark.usefixtures("on_a_server"), pytest.mark.filterwarnings("ignore")]
_CLIENT_PLUGINS = ("djinn-backend-fleet", "djinn-backend-replay", "djinn-cache-results", "djinn-planning",
                   "djinn-wire-delta")
_SERVER_PLUGIN = "djinn-memory-tiered"
_ALL_OFF = ",".join(f"-{name}" for name in (*_CLIENT_PLUGINS, _SERVER_PLUGIN))
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


@attrs.frozen
class BareServer:
    """A server without any of the plugins.

    Attributes:
        address: Its address.
        token: Token of a tenant without limits.
        limited: Token of a tenant with a memory limit.
    """

    address: str
    token: str
    limited: str


@pytest.fixture(scope="module")
def bare_server(start_server_of_module: Any, tmp_path_factory: pytest.TempPathFactory) -> BareServer:
    tokens = TokenFile(tmp_path_factory.mktemp("bare") / "tokens.json")
    free, limited = tokens.create("free"), tokens.create("limited", limits=Limits(memory_bytes=2**20))
    server = start_server_of_module("--tokens", str(tokens.path), DJINN_PLUGINS=_ALL_OFF)
    return BareServer(server.address, free, limited)


def _generated_without(*plugins: str, **settings: Any) -> torch.Tensor:
    from support.models.gpt2 import generated, gpt2

    djinn.init(plugins=[f"-{name}" for name in plugins], **settings)
    return generated(gpt2(**_SMALL).to("remote_accelerator:0"), _PROMPT.to("remote_accelerator:0"), 12)


def test_gpt2_generates_without_any_of_them(expected: torch.Tensor, bare_server: BareServer) -> None:
    made = _generated_without(*_CLIENT_PLUGINS, _SERVER_PLUGIN, server=bare_server.address, token=bare_server.token)
    assert torch.equal(made, expected)


def test_gpt2_generates_where_only_the_server_lacks_them(expected: torch.Tensor, bare_server: BareServer) -> None:
    assert torch.equal(_generated_without(server=bare_server.address, token=bare_server.token), expected)


def test_a_memory_limit_that_no_plugin_keeps_is_refused_by_name(bare_server: BareServer) -> None:
    done = run_djinn("serve", "--memory-mib", "8", DJINN_PLUGINS=f"-{_SERVER_PLUGIN}")
    assert done.returncode == 2
    assert "needs a plugin of the kind memory" in done.stderr
    assert _SERVER_PLUGIN in done.stderr
    # The limit of a token is known only when its tenant comes.
    with pytest.raises(DjinnError, match="needs a plugin of the kind memory") as raised:
        djinn.init(server=bare_server.address, token=bare_server.limited)
    assert _SERVER_PLUGIN in str(raised.value)


@pytest.mark.parametrize("plugin", _CLIENT_PLUGINS)
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

    djinn.init(plugins=[f"-{name}" for name in _CLIENT_PLUGINS])
    assert all(map(torch.equal, weights("remote_accelerator:0"), weights("cpu")))


@pytest.mark.parametrize(("plugin", "settings", "error", "said"), [
    ("djinn-backend-fleet", {"servers": ["local://", "local://"]}, PluginError, "There is no backend"),
    ("djinn-backend-replay", {"recovery": "replay"}, ConfigurationError, "There is no setting 'recovery'"),
    ("djinn-cache-results", {"result_cache_bytes": 2**20}, ConfigurationError, "result_cache_bytes"),
    ("djinn-planning", {"plugins": "-djinn-planning,scheduler=latency"}, ConfigurationError, "the scheduler 'latency'"),
])
def test_a_setting_that_needs_a_plugin_names_it(
    plugin: str, settings: dict[str, Any], error: type[Exception], said: str,
) -> None:
    with pytest.raises(error, match=said) as raised:
        djinn.init(**{"plugins": [f"-{plugin}"], **settings})
    assert plugin in str(raised.value)
    djinn.init()
    assert torch.ones(2, device="remote_accelerator:0").sum().item() == 2
