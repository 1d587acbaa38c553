"""What `nox -s chaos -- fairness` measures: the slowest requests of a tenant while another one does his worst.

The machine should have nothing else to do. `DJINN_CHAOS_REQUESTS` says how many requests each figure is of.

A tenant may use the cores that another one leaves idle, and on a machine of few cores whatever computes makes the
slowest requests of others slower, without any server. So all is compared with the same requests beside processes that
compute as much as the worst tenant and his worker do, and have nothing to do with the server; taking turns, in rounds.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.clients.hostile import hostile_tenant
from support.clients.tenants import Worked, percentile, products_for
from support.servers.serving import Serving

from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile

REQUESTS = int(os.environ.get("DJINN_CHAOS_REQUESTS", "800"))
LENGTH_S = 5e-3
"""Of the victim's requests; with the pause between them it uses a quarter of a device."""
PAUSE_S = 15e-3
ROUNDS = 8
COMPUTES = """
import os, sys, torch
os.nice(int(sys.argv[1]))
torch.set_num_threads(1)
matrix = torch.eye(128)
print(flush=True)
while True:
    matrix.mm(matrix)
"""


def processor_s(process: int) -> float:
    """Return the processor time of a process; see proc(5)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Scene:
    """A server, somebody who does nothing wrong, and somebody else.

    Attributes:
        places: How many tenants may use the device at a time.
        handing_over_s: What it may take until a turn that somebody else has is given back: the rest of one of the
            flood's programs, and four messages between processes.
    """

    def __init__(self, place: Path, *arguments: str) -> None:
        tokens = TokenFile(place / "tokens.json")
        self.good = tokens.create("good")
        self.bad = tokens.create("bad", limits=Limits(handles=64, queued=256, inflight_bytes=2**26))
        self.serving = Serving(place / "log", "--tokens", str(tokens.path), *arguments)
        with Worked(self.serving.address, self.good, 50) as trial:
            self.count = products_for(trial, LENGTH_S, 50)
        self.victim = Worked(self.serving.address, self.good, self.count)
        self.handing_over_s = 0.0
        self.places = "one tenant" if "--device-turns" in arguments else "as many tenants as there are cores"

    def times(self) -> list[float]:
        """A round of the victim's requests; each has to succeed."""
        found = []
        for _ in range(REQUESTS // ROUNDS):
            found.append(self.victim.ask())
            time.sleep(PAUSE_S)
        return found

    def bad_worker(self) -> int:
        return int(re.findall(r"bad: worker (\d+) serves", self.serving.log.read_text())[-1])


@pytest.fixture(scope="module", params=["as many as have a core", "one at a time"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    turns = () if request.param == "as many as have a core" else ("--device-turns", "1")
    made = Scene(tmp_path_factory.mktemp("scene"), *turns)
    if turns:
        made.handing_over_s = LENGTH_S / 10 + 1e-3
    with made.serving:
        yield made
        made.victim.close()


def floods(scene: Scene, stack: ExitStack) -> None:
    """Many sessions with queues that never end, of short programs."""
    stack.enter_context(hostile_tenant("floods", scene.serving.address, scene.bad, max(1, scene.count // 10)))


def fills(scene: Scene, stack: ExitStack) -> None:
    """Sends much, to be kept, which is against the limits most of the time."""
    stack.enter_context(hostile_tenant("fills", scene.serving.address, scene.bad))


def dies(scene: Scene, stack: ExitStack) -> None:
    """Crashes a worker as soon as there is one."""
    Worked(scene.serving.address, scene.bad, 1).close()
    stopping = threading.Event()

    def kill() -> None:
        dead = 0
        while not stopping.wait(0.01):
            worker = scene.bad_worker()
            if worker != dead:
                os.kill(worker, signal.SIGSEGV)
                dead = worker

    thread = threading.Thread(target=kill)
    thread.start()
    stack.callback(thread.join, 60)
    stack.callback(stopping.set)


def computes(_: Scene, stack: ExitStack) -> None:
    """What a flood computes: a worker, and his own computer, which gives way as in `hostile_tenant`."""
    for niceness in (0, 19):
        stack.enter_context(_computing(niceness))


@contextmanager
def _computing(niceness: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", COMPUTES, str(niceness)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield
        finally:
            process.kill()


DOES = {floods: "floods its queues", fills: "fills its memory", dies: "crashes its worker again and again"}


@pytest.mark.parametrize("does", DOES)
def test_the_slowest_requests_of_another_tenant(
    scene: Scene, does: Callable[[Scene, ExitStack], None], tell: Callable[[str, str], None],
) -> None:
    found: dict[str, list[float]] = {"disturbed": [], "beside others that compute": [], "alone": []}
    for _ in range(ROUNDS):
        for how, disturbs in zip(found, (does, computes, None), strict=True):
            with ExitStack() as stack:
                if disturbs is not None:
                    disturbs(scene, stack)
                time.sleep(0.5)
                found[how] += scene.times()
    slowest = {how: percentile(times, 0.99) for how, times in found.items()}
    disturbed, *usual = slowest.values()
    tell(f"Another tenant {DOES[does]}; {scene.places} on the device at a time",
         "0 failures; p50, p90, p99 of a request " + "; ".join(
             ", ".join(f"{percentile(times, part) * 1e3:.2f}" for part in (0.5, 0.9, 0.99)) + f" ms {how}"
             for how, times in found.items()) + f": p99 {', '.join(f'{disturbed / other:.2f}' for other in usual)}"
         " times")
    handing_over_s = scene.handing_over_s if does is floods else 0.0
    assert disturbed <= 1.2 * max(usual) + handing_over_s


LONG_S, SMALL_S, GAP_S = 2.0, 1e-3, 0.1


def test_small_requests_beside_long_programs(tmp_path: Path, tell: Callable[[str, str], None]) -> None:
    """Ten small requests a second beside a tenant whose programs take 2 s; and these programs, alone and beside them.

    What the small requests take is theirs; beyond that, the long programs may lose what pausing costs.
    """
    tokens = TokenFile(tmp_path / "tokens.json")
    names = {name: tokens.create(name) for name in ("long", "small")}
    with ExitStack() as stack:
        serving = stack.enter_context(Serving(tmp_path / "log", "--tokens", str(tokens.path), "--device-turns", "1",
                                              "--no-look-ahead"))
        with Worked(serving.address, names["long"], 50) as trial:
            per_second = products_for(trial, 1.0, 50)
        long = stack.enter_context(Worked(serving.address, names["long"], int(LONG_S * per_second)))
        small = stack.enter_context(Worked(serving.address, names["small"], max(1, int(SMALL_S * per_second))))
        worker = int(re.findall(r"long: worker (\d+) serves", (tmp_path / "log").read_text())[-1])
        alone, beside = list[tuple[float, float]](), list[tuple[float, float]]()
        waits, undisturbed = list[float](), [small.ask() for _ in range(50)]

        def long_one() -> tuple[float, float]:
            """Return the time that a long program took, and its worker's processor time."""
            before_s = processor_s(worker)
            return long.ask(), processor_s(worker) - before_s

        for _ in range(max(4, REQUESTS // 80)):
            alone.append(long_one())
            over = threading.Event()

            def ask(over: threading.Event) -> None:
                while not over.wait(GAP_S):
                    waits.append(small.ask())

            thread = threading.Thread(target=ask, args=(over,))
            count = len(waits)
            thread.start()
            took_s, used_s = long_one()
            over.set()
            thread.join()
            beside.append((took_s - (len(waits) - count) * percentile(undisturbed, 0.5), used_s))
    slower, costlier = (sum(each[part] for each in beside) / sum(each[part] for each in alone) for part in (0, 1))
    tell("Ten requests of 1 ms a second beside another tenant's programs of 2 s; one tenant on the device at a time",
         ", ".join(f"p{part * 100:.0f} {percentile(waits, part) * 1e3:.2f} ms" for part in (0.5, 0.99))
         + f" of {len(waits)} requests; alone {percentile(undisturbed, 0.5) * 1e3:.2f} ms; the long programs took "
           f"{slower:.3f} times as long as alone without the time of the small ones, and {costlier:.3f} times the "
           f"processor time; a load of {os.getloadavg()[0]:.0f} on the machine")
    assert percentile(waits, 0.99) < 0.06
    assert costlier < 1.03
