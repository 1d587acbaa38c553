"""Whatever dies whenever: the values are those of a run that nothing disturbed."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import djinn
from djinn.errors import TransportError
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session.session import Session
from djinn_conformance.crashes import let_die
from djinn_plugins.replay import returning
from djinn_plugins.replay.returning import ReturnWatch

DEVICE = "remote_accelerator:0"
EXAMPLES = int(os.environ.get("DJINN_RECOVERY_EXAMPLES", "25"))


class Pair:
    """The same program, eager and remote."""

    def __init__(self, session: Session, data: st.DataObject) -> None:
        self.session = session
        self.data = data
        self.made: list[list[torch.Tensor]] = []
        self.count = 0
        self.generator = torch.get_rng_state()

    def draw(self, *choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))

    def both(self, function: Any, *args: Any) -> None:
        remote = function(DEVICE, *(tensor[1] for tensor in args))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.generator)
            mine = function("cpu", *(tensor[0] for tensor in args))
            self.generator = torch.get_rng_state()
        if mine is not None:
            self.made.append([mine, remote])

    def one(self) -> list[torch.Tensor]:
        return self.made[self.data.draw(st.integers(0, len(self.made) - 1))]

    def create(self) -> None:
        self.count += 1
        value = float(self.count)
        kind = self.draw("upload", "randn", "full", "large")
        if kind == "upload":
            tensor = torch.full((3, 4), value)
            self.both(lambda device: tensor.clone().to(device))
        elif kind == "large":
            # Beyond what is copied, and never changed here: the remote one is sent from memory of its own.
            large = torch.full((600, 600), value)
            self.both(lambda device: large.clone().to(device)[:3, :4])
        elif kind == "randn":
            self.both(lambda device: torch.randn(3, 4, device=device))
        else:
            self.both(lambda device: torch.full((3, 4), value, device=device))

    def view(self) -> None:
        kind, source = self.draw("t", "detach", "row", "unbind", "chunk"), self.one()
        views = {"t": lambda _, x: x.t() if x.dim() < 3 else x, "detach": lambda _, x: x.detach(),
                 "row": lambda _, x: x[0] if x.dim() else x, "unbind": lambda _, x: x.unbind()[-1] if x.dim() else x,
                 "chunk": lambda _, x: x.chunk(2)[0] if x.dim() else x}
        self.both(views[kind], source)

    def write(self) -> None:
        kind = self.draw("add_", "mul_", "fill_", "bernoulli_", "add_other", "t_")
        target, other = self.one(), self.one()

        def add_other(_: str, x: torch.Tensor, y: torch.Tensor) -> None:
            x.add_(y.sum())

        writes = {"add_": lambda _, x, y: (x.add_(1), None)[1],
                  "mul_": lambda _, x, y: (x.mul_(2), None)[1], "fill_": lambda _, x, y: (x.fill_(7), None)[1],
                  "bernoulli_": lambda _, x, y: (x.bernoulli_(0.5), None)[1], "add_other": add_other,
                  "t_": lambda _, x, y: (x.t_(), None)[1] if x.dim() == 2 else None}
        self.both(writes[kind], target, other)

    def compute(self) -> None:
        kind, one, other = self.draw("neg", "sum", "both", "dropout"), self.one(), self.one()
        functions = {"neg": lambda _, x, y: -x, "sum": lambda _, x, y: x.sum(), "both": lambda _, x, y: x + y.mean(),
                     "dropout": lambda _, x, y: torch.nn.functional.dropout(x, 0.5)}
        self.both(functions[kind], one, other)

    def move(self) -> None:
        target, source = self.one(), self.one()
        self.both(lambda _, x, y: (x.set_(y), None)[1], target, source)

    def free(self) -> None:
        if len(self.made) > 1:
            del self.made[self.data.draw(st.integers(0, len(self.made) - 1))]

    def read(self) -> None:
        mine, remote = self.one()
        assert torch.equal(remote.cpu(), mine), self.draw("read")

    def disturb(self) -> None:
        kind = self.draw("flush", "compact", "checkpoint", "synchronize", "die", "die", "seed", "state")
        if kind == "flush":
            djinn.flush()
        elif kind == "synchronize":
            self.session.synchronize()
        elif kind == "compact":
            unwrapped(self.session.backend).journal.compact()
        elif kind == "checkpoint":
            with self.session.lock:
                self.session.synchronize()
                unwrapped(self.session.backend).checkpoint()
        elif kind == "seed":
            self.session.seed(self.count)
            self.generator = torch.Generator().manual_seed(self.count).get_state()
        elif kind == "state":
            self.session.set_random_state(torch.Generator().manual_seed(9).get_state())
            self.generator = torch.Generator().manual_seed(9).get_state()
        else:
            let_die(self.session, self.draw(0, 1, 2), delivers=self.draw(False, True))

    def check(self) -> None:
        for mine, remote in self.made:
            assert torch.equal(remote.cpu(), mine)
            assert remote.stride() == mine.stride()
        assert torch.equal(self.session.random_state(), self.generator)


@given(data=st.data())
@settings(deadline=None, max_examples=EXAMPLES)
def test_random_programs_survive_deaths_at_random_places(data: st.DataObject) -> None:
    torch.manual_seed(0)
    flush_every = data.draw(st.sampled_from([1, 3, "auto", None]))
    session = djinn.init(recovery="replay", device="cpu", flush_every=flush_every, recovery_timeout_s=0.2,
                         log_level="ERROR")
    try:
        pair = Pair(session, data)
        pair.create()
        for _ in range(data.draw(st.integers(5, 40))):
            getattr(pair, pair.draw("create", "view", "view", "write", "write", "compute", "free", "move", "read",
                                    "disturb", "disturb"))()
        pair.check()
        let_die(session)
        pair.check()
        pair.made.clear()
        gc.collect(0)
        session.synchronize()
        assert session.stats()["live_handles"] == 0
        unwrapped(session.backend).checkpoint()
        assert unwrapped(session.backend).journal.node_count == 0
        assert not unwrapped(session.backend).journal.live
    finally:
        djinn.shutdown()


class FleetPair(Pair):
    """The same on several executors, of which some are gone for a while."""

    def __init__(self, session: Session, data: st.DataObject) -> None:
        super().__init__(session, data)
        self.gone = 0
        self.tries = 0
        reconnector = unwrapped(session.backend)._reconnector
        opens = reconnector.open

        def reach(address: str, servers: int = 3) -> Any:
            self.tries += 1
            if self.tries % servers < self.gone:
                raise TransportError("Nobody answers.")
            return opens(address)

        reconnector.open = reach
        reconnector.returning = ReturnWatch(partial(reach, servers=1))

    def disturb(self) -> None:
        """Let servers go and come back, and place what follows anywhere."""
        kind = self.draw("fewer", "back", "pin", "other")
        if kind == "other":
            super().disturb()
        elif kind == "pin":
            self.session.flush()
            self.session.backend.placing.pin(self.draw(None, 0, len(self.session.backend.executors) - 1))
        else:
            self.gone = 0
            if kind == "fewer":
                self.lose(self.draw(1, 2), self.draw(0, 1, 2), delivers=self.draw(False, True))

    def lose(self, servers: int, messages: int = 0, *, delivers: bool = False) -> None:
        """Let all servers die, of which this many do not come back at once."""
        self.gone, self.tries = servers, -1
        let_die(self.session, messages, delivers=delivers)


@given(data=st.data())
@settings(deadline=None, max_examples=EXAMPLES // 2)
def test_random_programs_survive_servers_that_go_and_come_back(data: st.DataObject) -> None:
    torch.manual_seed(0)
    session = djinn.init(servers=["local://"] * 3, placement="automatic", recovery="replay", device="cpu",
                         flush_every=data.draw(st.sampled_from([1, "auto"])), recovery_timeout_s=0.2,
                         failover_timeout_s=1e-6, log_level="ERROR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(returning, "EVERY_S", 0.0)
        patch.setattr(returning, "SHARE", 1e9)
        try:
            pair = FleetPair(session, data)
            pair.create()
            for _ in range(data.draw(st.integers(5, 40))):
                getattr(pair, pair.draw("create", "view", "write", "compute", "free", "move", "read", "disturb",
                                        "disturb"))()
            pair.lose(1)
            pair.check()
            pair.gone, before = 0, session.stats()["servers_returned"]
            pair.check()
            pair.check()
            assert session.stats()["servers_returned"] == before + 1
            assert len(session.backend.executors) == 3
            session.backend.placing.pin(2)
            for made in list(pair.made):
                pair.both(lambda _, x: x + 1, made)
            pair.check()
        finally:
            djinn.shutdown()
