"""The journal, what is kept, what is fetched, and how servers are found again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import djinn
from djinn.errors import ConfigurationError, TransportError
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session.session import Session
from djinn_conformance.crashes import let_die
from djinn_plugins.replay import budget
from djinn_plugins.replay.reconnecting import Reconnector
from djinn_plugins.replay.retained import Kept
from djinn_plugins.replay.settings import RecoverySettings

DEVICE = "remote_accelerator:0"


@pytest.fixture
def session() -> Iterator[Session]:
    yield djinn.init(recovery="replay", device="cpu", recovery_timeout_s=0.2, log_level="ERROR")
    djinn.shutdown()


def test_without_recovery_nothing_of_it_is_there() -> None:
    session = djinn.init(device="cpu")
    assert type(unwrapped(session.backend)).__module__ == "djinn.session.single_backend"
    assert "recoveries" not in djinn.stats()
    djinn.shutdown()


@pytest.mark.parametrize("settings", [{"recovery": "never"}, {"recovery_bytes": -1}, {"recovery_timeout_s": 0},
                                      {"recovery_budget_s": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        djinn.init(**settings)


def test_the_journal_forgets_what_nobody_needs() -> None:
    session = djinn.init(recovery="replay", device="cpu", recovery_budget_s=1000, log_level="ERROR")
    x = torch.ones(4, device=DEVICE)
    for _ in range(5000):
        x = x + 1
        torch.zeros(3, device=DEVICE).add_(1)
    x.cpu()
    unwrapped(session.backend).journal.compact()
    assert unwrapped(session.backend).journal.node_count == 5001
    unwrapped(session.backend).checkpoint()
    assert unwrapped(session.backend).journal.node_count == 0
    let_die(session)
    assert x.cpu().tolist() == [5001.0] * 4
    del x
    session.synchronize()
    unwrapped(session.backend).journal.compact()
    journal = unwrapped(session.backend).journal
    assert journal.size_bytes == sum(
        state.numel() for entry in journal.entries for _, state in getattr(entry, "states", ()))


def test_long_work_is_checkpointed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CHECKPOINT_SHARE", 10.0)
    session = djinn.init(recovery="replay", device="cpu", recovery_budget_s=1e-3, log_level="ERROR")
    x = torch.ones(4, device=DEVICE)
    longest = 0
    for _ in range(60):
        for _ in range(20):
            x = x * 1.5 - 1
        x.sum().item()
        longest = max(longest, unwrapped(session.backend).journal.node_count)
    assert djinn.stats()["checkpoints"] > 1
    assert longest < 500
    wanted = x.cpu()
    let_die(session)
    assert torch.equal(x.cpu(), wanted)


def test_what_is_large_and_quickly_made_is_not_fetched(session: Session) -> None:
    large = torch.zeros(2**20, device=DEVICE)
    small = torch.ones(4, device=DEVICE)
    for _ in range(300):
        small = small + 1
    small.cpu()
    unwrapped(session.backend).checkpoint(seconds_per_node=1e-4)
    assert djinn.stats()["checkpoint_bytes"] == 16
    let_die(session)
    assert not large.cpu().any()


def test_random_numbers_go_on_behind_a_checkpoint(session: Session) -> None:
    session.seed(3)
    wanted = [torch.rand(2, generator=generator) for generator in [torch.Generator().manual_seed(3)] for _ in range(3)]
    got = [torch.rand(2, device=DEVICE)]
    session.synchronize()
    unwrapped(session.backend).checkpoint()
    let_die(session)
    got.append(torch.rand(2, device=DEVICE))
    got[-1].cpu()
    let_die(session)
    got.append(torch.rand(2, device=DEVICE))
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_is_done_again_only_if_it_is_needed_or_draws(session: Session, dropout_p: float) -> None:
    def attended(device: str) -> torch.Tensor:
        x = torch.ones(1, 2, 8, 4, device=device)
        for _ in range(20):
            scaled_dot_product_attention(x + 1, x, x, dropout_p=dropout_p).sum().item()
        return torch.rand(3, device=device)

    session.seed(3)
    attended(DEVICE)
    journal = unwrapped(session.backend).journal
    journal.compact()
    assert (journal.node_count < 10) == (dropout_p == 0)
    let_die(session)
    got = attended(DEVICE)
    torch.manual_seed(3)
    attended("cpu")
    assert torch.equal(got.cpu(), attended("cpu"))


def test_a_view_whose_base_is_gone_is_checkpointed_with_it(session: Session) -> None:
    base = torch.arange(12.0, device=DEVICE).view(3, 4) + 1
    view, row = base.t(), base[1]
    del base
    row.mul_(2)
    session.synchronize()
    unwrapped(session.backend).checkpoint()
    assert unwrapped(session.backend).journal.node_count == 0
    let_die(session)
    row.add_(1)
    wanted = torch.arange(12.0).view(3, 4) + 1
    wanted[1] = wanted[1] * 2 + 1
    assert torch.equal(view.cpu(), wanted.t())
    assert view.stride() == wanted.t().stride()


def test_a_storage_that_is_taken_over_behind_a_checkpoint_keeps_its_own_history(session: Session) -> None:
    one, other = torch.zeros(3, device=DEVICE), torch.randn(3, device=DEVICE)
    taken = torch.zeros(3, device=DEVICE)
    taken.set_(one)
    one.add_(1)
    session.synchronize()
    unwrapped(session.backend).checkpoint()
    other.set_(one)
    session.synchronize()
    let_die(session)
    assert other.cpu().tolist() == one.cpu().tolist() == taken.cpu().tolist() == [1, 1, 1]


def test_counters_only_rise(session: Session) -> None:
    x = torch.ones(3, device=DEVICE) + 1
    x.cpu()
    before = djinn.stats()
    let_die(session)
    x.cpu()
    after = djinn.stats()
    levels = {"journal_bytes", "journal_ms", "journal_nodes", "live_handles", "pending_nodes", "programs_known",
              "results_kept", "results_kept_bytes"}
    assert [name for name in before if after[name] < before[name] and name not in levels] == []
    assert after["live_handles"] == before["live_handles"]
    assert after["recoveries"] == 1
    assert after["nodes_replayed"] == 2


def test_what_happens_is_logged(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("djinn.recovery").setLevel(logging.INFO)
    x = torch.ones(3, device=DEVICE) + 1
    x.cpu()
    let_die(session)
    with caplog.at_level(logging.INFO, "djinn.recovery"):
        x.cpu()
    said = [record.getMessage() for record in caplog.records if record.name == "djinn.recovery"]
    assert said[0].startswith("local:// died: The connection to local:// was cut")
    assert "going on at local://: 2 operations are carried out again" in said[1]
    assert said[2].startswith("recovered at local://")


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.data.add_(1), lambda x: x.numpy().fill(3)],
                         ids=["in place", "data", "numpy"])
def test_a_change_of_what_is_kept_by_reference_is_seen(change: Any) -> None:
    tensor = torch.zeros(1000, 1000)
    kept = Kept.of(tensor)
    assert kept.tensor.data_ptr() == tensor.data_ptr()
    assert kept.is_unchanged
    change(tensor[500:501])
    assert not kept.is_unchanged


def test_small_tensors_are_copied() -> None:
    tensor = torch.zeros(10)
    kept = Kept.of(tensor)
    tensor.add_(1)
    assert kept.is_unchanged
    assert not kept.tensor.any()


class Somewhere:
    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("fills_up", "wanted"), [(True, ["b", "b"]), (False, ["b"])])
def test_servers_that_are_left_do_the_work_of_those_that_are_gone(fills_up: bool, wanted: list[str]) -> None:
    def reach(address: str) -> Any:
        if address == "a":
            raise TransportError("Nobody answers.")
        return Somewhere(address)

    found = Reconnector(["a", "b"], reach, 0.1, fills_up=fills_up, falls_back=False).connect()
    assert [connection.address for connection in found] == wanted


def test_a_server_that_another_can_replace_is_waited_for_less_long() -> None:
    def reach(address: str) -> Any:
        if address == "a":
            raise TransportError("Nobody answers.")
        return Somewhere(address)

    began = time.monotonic()
    assert Reconnector(["a", "b"], reach, 60.0, fills_up=True, falls_back=False, failover_s=0.1).connect()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("addresses", "is_on"), [
    (("",), False), (("tcp://a:1",), False), (("local://", "local://"), False), (("tcp://a:1", "tcp://b:1"), True),
])
def test_values_are_recomputed_by_default_where_another_server_could_do_it(
    addresses: tuple[str, ...], is_on: bool
) -> None:
    assert RecoverySettings().is_on(addresses) is is_on
    assert RecoverySettings(local_fallback=True).is_on(addresses)
    assert RecoverySettings(recovery="replay").is_on(addresses)
    assert not RecoverySettings(recovery="none", local_fallback=True).is_on(addresses)


def test_a_server_may_take_its_time_to_come_back() -> None:
    tries: list[str] = []

    def reach(address: str) -> Any:
        tries.append(address)
        if len(tries) < 5:
            raise TransportError("Nobody answers.")
        return Somewhere(address)

    assert Reconnector(["a"], reach, 10.0, fills_up=True, falls_back=False).connect()
    assert len(tries) == 5


def test_what_was_reached_is_closed_if_somebody_interrupts() -> None:
    reached: list[Somewhere] = []

    def reach(address: str) -> Any:
        if address == "b":
            raise KeyboardInterrupt
        reached.append(Somewhere(address))
        return reached[-1]

    with pytest.raises(KeyboardInterrupt):
        Reconnector(["a", "b"], reach, 10.0, fills_up=True, falls_back=False).connect()
    assert reached[0].closed
