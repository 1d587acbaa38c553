"""A client that is interrupted.

``python -m support.clients.interrupted CASE SETTINGS``, run by tests/integration/test_interrupts.py.

It says by a line what it is about to do, and by ``waits`` that it waits: then the test presses Ctrl-C. What is true in
the end it asserts itself, and says ``done``.
"""

from __future__ import annotations

import _signal
import atexit
import ctypes
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import djinn
from djinn.errors import OperationCancelledError, StateLostError
from djinn_plugins.common.interrupts import Deferral

DEVICE = "remote_accelerator:0"
STEPS, SIDE = 4000, 700
"""Of work that takes minutes, each step some milliseconds."""
SEED, TRIALS = int(os.environ.get("INTERRUPTED_SEED", "0")), int(os.environ.get("INTERRUPTED_TRIALS", "30"))
"""Of alarms at random moments."""
STORM = 300
"""Interrupts of which some come in the midst of another."""


def say(word: str) -> None:
    print(word, flush=True)


def interrupted(action: Callable[[], Any], *, may_end: bool = False) -> None:
    """Do something that waits; it has to end with the interrupt that follows when it says so.

    Args:
        action: Waits.
        may_end: It may have ended just before; then it is as good that the interrupt comes afterwards.
    """
    over = threading.Event()
    waits = threading.Event()

    def look() -> None:
        while not over.is_set():
            handler = _signal.getsignal(signal.SIGINT)
            if isinstance(handler, Deferral) and handler._wake is not None:
                waits.set()
                say("waits")
                return
            time.sleep(0.001)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        action()
        assert may_end, "it ended by itself"
        over.set()
        looking.join()
        if not waits.is_set():
            say("waits")
        threading.Event().wait()
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        over.set()
        looking.join()


class Work:
    """Steps that count themselves in place, and what was there before."""

    def __init__(self, side: int = SIDE, device: str = DEVICE) -> None:
        self.device = device
        self.factor = torch.full((side, side), 1 / side).to(device)
        self.counter = torch.zeros((), dtype=torch.int64).to(device)
        self.computed = self.factor.sum()
        self.side = side
        assert self.value_of(self.computed) == side
        self.counted = self.counter.item()

    @staticmethod
    def value_of(tensor: torch.Tensor) -> int:
        return round(tensor.item())

    def begin(self, steps: int = STEPS) -> None:
        self.product = self.factor
        for _ in range(steps):
            self.product = self.factor @ self.product
            self.counter.add_(1)

    def check(self, steps: int = STEPS) -> None:
        """What was computed is there, what was cancelled says so, and nothing of it runs afterwards."""
        counted = self.counter.item()
        assert counted - self.counted < steps, counted
        for read in (self.product.cpu, self.product.sum().item, (self.product @ self.factor).cpu):
            with pytest.raises(OperationCancelledError, match="Compute it again"):
                read()
        assert self.value_of(self.computed) == self.value_of(self.factor.sum()) == self.side
        more = torch.ones(3, device=self.device)
        assert (more + self.factor[0, :3] * self.side).tolist() == [2.0, 2.0, 2.0]
        assert self.counter.item() == counted
        self.begin(2)
        assert self.value_of(self.product.sum()) == self.side
        self.counted = counted + 2
        assert self.counter.item() == self.counted


def wait() -> None:
    """Twice, so that the second time finds what the first has left."""
    work = Work()
    for _ in range(2):
        work.begin()
        interrupted(work.product.sum().item)
        work.check()


def synchronize() -> None:
    work = Work()
    work.begin()
    interrupted(djinn.synchronize)
    work.check()


def twice() -> None:
    """Interrupted again while it waits for the step that the first interrupt has not ended, which takes a while."""
    work = Work(2000)
    work.begin(60)
    interrupted(work.product.sum().item)
    interrupted(work.counter.item, may_end=True)
    work.check(60)


def twice_here() -> None:
    """The same where an operation of this process does not end before it may."""
    released = threading.Event()

    @torch.library.custom_op("interrupted_client::hold", mutates_args=())
    def hold(tensor: torch.Tensor) -> torch.Tensor:
        released.wait()
        return tensor.clone()

    hold.register_fake(torch.empty_like)
    work = Work()
    held = hold(work.factor)
    work.begin()
    interrupted(work.product.sum().item)
    interrupted(work.counter.item)
    released.set()
    work.check()
    assert work.value_of(held.sum()) == work.side


def several() -> None:
    """What one server waits for another one computes; and each has work of its own."""
    first, second = Work(), Work(device="remote_accelerator:1")
    for _ in range(2):
        first.begin(), second.begin()
        there = first.product.to(second.device) @ second.product
        back = there.to(first.device) @ first.product
        interrupted(back.sum().item)
        first.check(), second.check()
        for cancelled in (there, back):
            with pytest.raises(OperationCancelledError):
                cancelled.cpu()
        assert Work.value_of((first.factor.to(second.device) @ second.factor).to(first.device).sum()) == SIDE


def upload() -> None:
    work = Work()
    small = torch.arange(5.0).to(DEVICE)
    large = torch.ones(2**25)
    work.begin()
    djinn.flush()
    interrupted(lambda: large.to(DEVICE))
    work.check()
    assert small.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    sent = large.to(DEVICE)
    assert sent.sum().item() == 2**25


def generate() -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=1024)).eval()
    prompt = torch.tensor([[7, 8, 9]])

    def tokens(device: str, count: int) -> list[Any]:
        with torch.no_grad():
            return model.generate(prompt.to(device), max_new_tokens=count, do_sample=False, pad_token_id=0,
                                  eos_token_id=None).tolist()

    wanted = tokens("cpu", 8)
    model.to(DEVICE)
    assert tokens(DEVICE, 8) == wanted
    interrupted(lambda: tokens(DEVICE, 1000))
    assert tokens(DEVICE, 8) == wanted


def threads() -> None:
    """Another thread waits: it goes on, and so does what it waits for."""
    work = Work()
    work.begin(60)
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(work.value_of(work.product.sum()))).start()
    try:
        say("waits")
        threading.Event().wait()
    except KeyboardInterrupt:
        say("interrupted")
    assert answers.get() == work.side
    assert work.counter.item() == 60


def own_handler() -> None:
    """A handler that raises nothing disturbs nothing."""
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    work = Work()
    work.begin(60)
    looking = threading.Timer(0, lambda: say("waits"))
    looking.start()
    assert work.value_of(work.product.sum()) == work.side
    assert work.counter.item() == 60
    while not heard:
        time.sleep(0.001)
    say("interrupted")
    assert heard == [signal.SIGINT]


def leave() -> None:
    """The interrupt ends the program, and another comes while it ends."""
    work = Work(2500)
    atexit.register(say, "leaves")
    work.begin()
    say("begun")
    work.product.sum().item()


def record() -> None:
    """Interrupted again and again while it records gradients."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(10)]).to(DEVICE)
    given = torch.ones(4, 8).to(DEVICE)
    for _ in range(50):
        try:
            say("waits")
            while True:
                layers(given).sum().backward()
        except KeyboardInterrupt:
            say("interrupted")
    layers.zero_grad()
    assert layers(given).shape == (4, 8)


class Doubled(torch.autograd.Function):
    """Users' own code below a backward pass."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def storm() -> None:
    """Interrupted while it is being interrupted, wherever that is."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(10)]).to(DEVICE)
    optimizer = torch.optim.SGD(layers.parameters())
    given = torch.ones(4, 8).to(DEVICE)
    heard, has_begun = 0, False

    def train() -> None:
        nonlocal has_begun
        if not has_begun:
            # From here on the next interrupt may come, also before this function returns.
            has_begun = True
            say("waits")
        while heard < STORM:
            hidden = layers(given)
            hidden.register_hook(lambda gradient: gradient * 1)
            Doubled.apply(hidden).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def again(action: Callable[[], object]) -> None:
        nonlocal heard
        # Until interrupts are ignored: one more may come when enough have been heard.
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            try:
                action()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            except KeyboardInterrupt:
                heard += 1

    # The next one may come before the first of these knows that it has heard one.
    again(lambda: again(lambda: again(train)))
    layer = torch.nn.Linear(8, 8).to(DEVICE)
    layer(given).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.sum().item() == 4 * 64


class Alarm(Exception):
    """What the handler of a timeout raises; its own class."""


def alarms() -> None:
    """Handlers of another signal raise at random moments of uploads, downloads, questions and early answers."""
    chosen = random.Random(SEED)
    factor, large = torch.randn(64, 64), torch.arange(2.0**20)
    here, there = factor.to(DEVICE), large.to(DEVICE)
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    kinds: list[type[BaseException]] = [Alarm, TimeoutError, ConnectionError, KeyboardInterrupt, SystemExit]
    kind = kinds[0]

    def ask() -> None:
        product = here
        for _ in range(20):
            product = (here @ product).tanh()
        product.sum().item()

    def upload() -> None:
        count = chosen.randrange(2**14, 2**20)
        made.append((large[:count].to(DEVICE), large[:count]))

    def upload_little() -> None:
        made.append((torch.full((9,), 3.0).to(DEVICE), torch.full((9,), 3.0)))
        djinn.flush()

    def download() -> None:
        assert torch.equal(there.cpu(), large)

    def be_answered_early() -> None:
        count = torch.zeros(4, device=DEVICE)
        for number in range(1, 60):
            count = count + 1
            assert count[0].item() == number

    def write() -> None:
        counter = torch.zeros(3).to(DEVICE)
        for number in range(1, 8):
            counter.add_(1)
            assert counter.sum().item() == 3 * number
        made.append((counter, torch.full((3,), 7.0)))

    def raise_it(number: int, frame: object) -> None:
        raise kind("it is late")

    signal.signal(signal.SIGALRM, raise_it)
    raised = 0
    for trial in range(TRIALS):
        kind = kinds[trial % len(kinds)]
        made.clear()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(0.0005, 0.03))
                until = time.monotonic() + 0.06
                while time.monotonic() < until:
                    (ask, upload, upload_little, download, be_answered_early, write)[trial % 6]()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except kind as error:
            raised += str(error) == "it is late"
        for lazy, eager in made:
            # What was cancelled before it had run says so.
            with suppress(OperationCancelledError):
                assert torch.equal(lazy.cpu(), eager)
        assert torch.equal(here.cpu(), factor)
        assert torch.equal((there[:8] + torch.ones(8).to(DEVICE)).cpu(), large[:8] + 1)
    # Python swallows one that comes in a destructor.
    assert raised >= 0.8 * TRIALS, raised


def thrown() -> None:
    """Another thread throws an exception into one that waits."""
    work = Work()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def wait_for_it() -> None:
        try:
            work.product.sum().item()
            ended.put(None)
        except Alarm as error:
            ended.put(error)

    for _ in range(3):
        work.begin(40)
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        while "sockets.py" not in "".join(traceback.format_stack(sys._current_frames()[waiting.ident or 0])):
            time.sleep(0.001)
        thrown = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(waiting.ident or 0), ctypes.py_object(Alarm))
        assert thrown == 1
        assert isinstance(ended.get(), Alarm)
        waiting.join()
        assert work.value_of(work.computed) == work.value_of(work.factor.sum()) == work.side


def recover() -> None:
    """What was cancelled is not done again when the server dies."""
    work = Work()
    work.begin()
    interrupted(work.product.sum().item)
    assert work.value_of(work.factor.sum()) == work.side
    counted = work.counter.item()
    assert counted < STEPS
    killed = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: killed.set())
    say("kill")
    killed.wait()
    assert work.value_of(work.factor.sum()) == work.side
    assert work.value_of(work.computed) == work.side
    for read in (work.product.cpu, work.counter.cpu):
        with pytest.raises(StateLostError, match="interrupted"):
            read()
    assert djinn.stats()["recoveries"] == 1
    # Those that are known to have run, and the few around them.
    assert djinn.stats()["nodes_replayed"] <= 2 * counted + 20
    work = Work()
    work.begin(2)
    assert work.value_of(work.product.sum()) == work.side


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    case, settings = sys.argv[1], json.loads(sys.argv[2])
    djinn.init(log_level="ERROR", **settings)
    globals()[case]()
    say("done")


if __name__ == "__main__":
    main()
