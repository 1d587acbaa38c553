"""What `nox -s chaos` does to the network: it goes dark for 5 s of every 20 s, and each effect comes about once."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.network.fault_proxy import FaultProxy
from support.servers.crashes import DEVICE
from support.servers.serving import Serving

import djinn

DURATION_S = float(os.environ.get("DJINN_CHAOS_BLACKOUT_S", "600"))
EVERY_S, FOR_S = 20.0, 5.0


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
def test_every_effect_comes_about_once(tmp_path: Path, tell: Callable[[str, str], None]) -> None:
    with Serving(tmp_path / "log") as server, FaultProxy(server.port) as proxy:
        djinn.init(server=proxy.address, recovery="none", log_level="ERROR")
        counter = torch.zeros((), dtype=torch.int64, device=DEVICE)
        weights = torch.randn(256, 256)
        total = torch.zeros(256, 256, device=DEVICE)
        wanted = torch.zeros(256, 256)
        ended = threading.Event()

        def darken() -> None:
            # Every other time the connections are not reset: TCP itself goes on where it was, or gives up.
            index = 0
            while not ended.wait(EVERY_S - FOR_S):
                index += 1
                if index % 2:
                    proxy.black_out(FOR_S)
                else:
                    proxy.vanish()
                    time.sleep(FOR_S)
                    proxy.heal()

        thread = threading.Thread(target=darken, daemon=True)
        thread.start()
        steps, longest_s, until = 0, 0.0, time.monotonic() + DURATION_S
        while time.monotonic() < until:
            began = time.monotonic()
            counter += 1
            steps += 1
            if steps % 7 == 0:
                total += weights.to(DEVICE)
                wanted += weights
            if steps % 10 == 0:
                assert counter.item() == steps
            longest_s = max(longest_s, time.monotonic() - began)
        ended.set()
        thread.join(FOR_S + EVERY_S)
        assert counter.item() == steps
        assert torch.equal(total.cpu(), wanted)
        reconnections = djinn.stats()["reconnections"]
        assert reconnections >= DURATION_S / EVERY_S / 2 - 1
        tell(f"Blackouts of the network of {FOR_S:g} s every {EVERY_S:g} s for {DURATION_S:g} s, while a loop counts",
             f"{steps:,} steps, every effect exactly once; {reconnections} reconnections, the longest pause "
             f"{longest_s:.1f} s")
        djinn.shutdown()
