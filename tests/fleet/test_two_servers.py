"""One model over two server processes, by their memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import pytest
import torch
from support.models.gpt2 import generated, gpt2
from support.servers.fleet import fleet_of

import djinn
from djinn.errors import OutOfMemoryError
from djinn.ir.tape import Node
from djinn.session.session import Session
from djinn_plugins.fleet.fleet import Fleet

DEVICE = "remote_accelerator:0"
MODEL = {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
"""1.4 million parameters: 5.5 MB, of which a layer has 0.8."""
MEMORY_MIB = 4
SMALL_BYTES = 4096
PROMPT = torch.tensor([[1, 5, 9, 2, 7, 3]])


@attrs.define
class Cut:
    """What a fleet ran where, watched from the outside."""

    ran: list[tuple[Node, int]] = attrs.field(factory=list)

    def minimum_bytes(self, homes: dict[int, int]) -> int:
        """Bytes that have to move, whoever arranges it: what is made in one place and read in another, once each.

        A view can be made wherever its base is, so the base stands for it if it is not larger.
        """
        sizes: dict[int, int] = {}
        bases: dict[int, int] = {}
        made_at: dict[int, int] = dict(homes)
        needed: set[tuple[int, int]] = set()
        for node, executor in self.ran:
            signature = node.signature
            for slot, spec in zip(node.inputs, signature.operands, strict=True):
                sizes.setdefault(slot.number, spec.size_bytes)
                number = slot.number
                while number in bases and sizes[bases[number]] <= sizes[slot.number]:
                    number = bases[number]
                if made_at.get(number, executor) != executor:
                    needed.add((number, executor))
            for slot, spec, alias in zip(node.outputs, signature.results, signature.aliases, strict=True):
                made_at[slot.number] = executor
                sizes[slot.number] = spec.size_bytes
                if alias >= 0:
                    bases[slot.number] = node.inputs[alias].number
        return sum(sizes[number] for number, _ in needed)


@pytest.fixture
def split(start_server: Callable[..., object]) -> Iterator[Session]:
    servers = [start_server("--memory-mib", str(MEMORY_MIB), "--threads", "1") for _ in range(2)]
    threads = torch.get_num_threads()
    # Libraries round differently with another number of them.
    torch.set_num_threads(1)
    yield djinn.init(servers=[server.address for server in servers], placement="automatic", recovery="none")
    djinn.shutdown()
    torch.set_num_threads(threads)


def watched(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Cut:
    cut = Cut()
    put = fleet._put

    def noted(node: Node, executor: int) -> None:
        cut.ran.append((node, executor))
        put(node, executor)

    monkeypatch.setattr(fleet, "_put", noted)
    return cut


def test_a_model_that_fits_no_server_runs_on_two(split: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(**MODEL)
    weight_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert weight_bytes > MEMORY_MIB * 2**20
    with torch.no_grad():
        wanted = model(PROMPT).logits
    tokens = generated(model, PROMPT, 12)
    model.to(DEVICE)
    prompt = PROMPT.to(DEVICE)
    fleet = fleet_of(split)
    assert all(0 < held <= MEMORY_MIB * 2**20 for held in fleet.where.held_bytes)
    djinn.flush()
    places = [fleet.where.home_of(parameter._value.slot.number) for parameter in model.parameters()]
    assert set(places) == {0, 1}
    homes = {number: fleet.where.home_of(number) for number in fleet.where._values}
    cut = watched(fleet, monkeypatch)
    djinn.reset_stats()
    with torch.no_grad():
        logits = model(prompt).logits
        djinn.flush()
    assert torch.equal(logits.cpu(), wanted)
    assert djinn.stats()["bytes_transferred"] == cut.minimum_bytes(homes)
    hidden_bytes = PROMPT.numel() * MODEL["n_embd"] * 4
    assert 0 < djinn.stats()["bytes_transferred"] < 4 * hidden_bytes
    assert torch.equal(generated(model, PROMPT.to(DEVICE), 12), tokens)
    for parameter, home in zip(model.parameters(), places, strict=True):
        held = fleet.where.find(parameter._value.slot.number)
        assert fleet.where.home_of(parameter._value.slot.number) == home
        assert held is not None
        # The bias of a product may follow its weight. All tokens are generated in one program, for which a copy of the
        # small table of positions is less than to move what is looked up in it for each token.
        assert not held.copies or held.size_bytes < SMALL_BYTES or parameter is model.transformer.wpe.weight
    assert all(0 < held <= MEMORY_MIB * 2**20 for held in fleet.where.held_bytes)


def test_what_fits_nowhere_is_refused_and_an_argmax_brings_little_home(split: Session) -> None:
    with pytest.raises(OutOfMemoryError, match="5,242,880 bytes fits none"):
        torch.zeros(5 * 2**18).to(DEVICE)
    assert torch.ones(3, device=DEVICE).sum().item() == 3
    # A reduction is done where the values are: its result comes home, and little more.
    scores = torch.randn(8, 50257).to(DEVICE)
    djinn.synchronize()
    djinn.reset_stats()
    scores.argmax(-1).cpu()
    assert djinn.stats()["bytes_received"] <= 200
