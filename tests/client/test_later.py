"""Values that nobody waits for: in loops that only log them, over a guarded server, counted; and where it breaks."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.network import delaying_proxy
from support.processes.warm import run_python

import djinn
from djinn.errors import SessionClosedError
from djinn.hookspecs import hookimpl
from djinn_plugins.client.later import backend as backends

DEVICE = "remote_accelerator:0"
STEPS = 12


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, _Lines]]:
    """A logger whose lines wait for their values, and the lines."""
    # One that nobody else finds: pytest's own handler would wait for the values.
    logger, written = logging.Logger("test_later", logging.INFO), _Lines()  # noqa: LOG001  # see above
    handler = djinn.LaterHandler(written)
    logger.addHandler(handler)
    yield logger, written
    handler.close()


def _within(seconds: float, is_so: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.01)
    return is_so()


@pytest.mark.usefixtures("session")
def test_a_loop_that_logs_its_losses_waits_for_none_of_them(log: Any) -> None:
    logger, written = log

    def train(device: str, keep: Callable[[torch.Tensor], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(4, 8).to(device)
        losses = []
        for _ in range(STEPS):
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(keep(loss))
        return losses

    wanted = train("cpu", torch.Tensor.item)
    train(DEVICE, torch.Tensor.item)
    djinn.synchronize()
    djinn.reset_stats()
    steps = iter(range(STEPS))
    train(DEVICE, lambda loss: logger.info("step %d: loss %.3f", next(steps), djinn.later(loss)))
    logger.info("done")
    assert _within(20, lambda: len(written.lines) == STEPS + 1)
    assert djinn.stats()["round_trips"] == 0
    assert djinn.stats()["fetched_later"] == STEPS
    assert [float(line.rpartition(" ")[2]) for line in written.lines[:-1]] == pytest.approx(wanted, abs=6e-4)
    assert [line.partition(":")[0] for line in written.lines] == [*(f"step {step}" for step in range(STEPS)), "done"]


@pytest.mark.usefixtures("session")
def test_a_value_is_used_as_a_number_as_text_and_with_a_time_limit() -> None:
    x = torch.tensor([1.5, 2.5], device=DEVICE)
    value, both = djinn.later(x.sum()), djinn.later(x)
    x.zero_()
    assert repr(value) == "<LaterValue: not here yet>"
    assert value.result(timeout_s=20).item() == 4.0
    assert (f"{value:.2f}", str(value), repr(value)) == ("4.00", "4.0", "<LaterValue: 4.0>")
    assert "%5.1f|%d" % (value, value) == "  4.0|4"  # noqa: UP031  # as logging formats
    assert (float(value), int(value), bool(value), round(value, 1)) == (4.0, 4, True, 4.0)
    assert value == 4
    assert 3 < value <= djinn.later(torch.tensor(4.0))
    assert both.result().tolist() == [1.5, 2.5]
    assert both.ready()
    with pytest.raises(TypeError, match="takes a tensor"):
        djinn.later(4.0)  # type: ignore[arg-type]  # what is wrong


@pytest.mark.usefixtures("session")
def test_large_values_and_many_come_too() -> None:
    large = djinn.later(torch.arange(2.0**16, device=DEVICE))
    many = [djinn.later(torch.ones(2**10, device=DEVICE) * number) for number in range(40)]
    assert large.result(timeout_s=20)[-1] == 2.0**16 - 1
    assert _within(20, lambda: sum(value.ready() for value in many) == len(many))
    assert [value.result()[0].item() for value in many] == list(range(40))


@pytest.mark.usefixtures("session")
def test_the_line_of_a_lost_value_says_why_and_the_next_wait_raises(log: Any) -> None:
    logger, written = log
    table = torch.ones(3, 1, device=DEVICE)
    lost = torch.nn.functional.embedding(torch.tensor([7.0]).to(DEVICE).long(), table).sum()
    logger.info("%d%%: %5.2f of %.1f", 50, djinn.later(lost), djinn.later(table.sum()))
    logger.info("%(loss).2f", {"loss": djinn.later(lost)})
    assert _within(20, lambda: len(written.lines) == 2)
    assert re.fullmatch(r"50%: <IndexError: .*> of 3\.0", written.lines[0])
    assert re.fullmatch(r"<IndexError: .*>", written.lines[1])
    with pytest.raises(IndexError):
        djinn.synchronize()
    djinn.synchronize()


@pytest.mark.usefixtures("session")
def test_values_come_before_the_session_ends() -> None:
    x = torch.arange(4.0, device=DEVICE)
    sent = djinn.later(x + 1)
    djinn.flush()
    pending = djinn.later(x * 2)
    djinn.shutdown()
    assert (sent.result().tolist(), pending.result().tolist()) == ([1, 2, 3, 4], [0, 2, 4, 6])


class Ended:
    """A plugin that notes which sessions have ended."""

    def __init__(self) -> None:
        self.stats: list[dict[str, int]] = []

    @hookimpl
    def djinn_session_closed(self, stats: dict[str, int]) -> None:
        self.stats.append(stats)


def test_an_interrupt_while_the_session_ends_is_raised_when_it_has_ended(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    ended = Ended()
    take_back = djinn.plugins.register(ended)
    try:
        session = djinn.init(server=server.address)
        pending = djinn.later(torch.ones(3, device=DEVICE) + 1)
        monkeypatch.setattr(backends, "fetch_outstanding", interrupted)
        with pytest.raises(KeyboardInterrupt):
            djinn.shutdown()
    finally:
        take_back()
    assert (len(ended.stats), len(session.tape), djinn.is_initialized()) == (1, 0, False)
    with pytest.raises(SessionClosedError):
        pending.result()


def test_a_program_that_ends_writes_its_last_lines(server: Any) -> None:
    program = ("import logging, djinn, torch\n"
               "logging.basicConfig(handlers=[djinn.LaterHandler(logging.StreamHandler())], level='INFO')\n"
               f"x = torch.ones(3, device={DEVICE!r})\n"
               "for step in range(3): logging.info('%d: %.1f', step, djinn.later((x * step).sum()))\n")
    done = run_python(program, DJINN_SERVER=server.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["INFO:root:0: 0.0", "INFO:root:1: 3.0", "INFO:root:2: 6.0"]


@pytest.mark.parametrize("recovery", ["none", "replay"])
def test_a_server_that_dies_takes_no_line_with_it(start_server: Any, log: Any, recovery: str) -> None:
    logger, written = log
    server = start_server()
    djinn.init(server=server.address, recovery=recovery, recovery_timeout_s=3.0)
    try:
        x = torch.ones(3, device=DEVICE)
        logger.info("first %.1f", djinn.later(x.sum()))
        assert _within(20, lambda: len(written.lines) == 1)
        server.kill()
        value = djinn.later((x * 2).sum())
        logger.info("second %.1f", value)
        with pytest.raises(djinn.DjinnError):
            value.result()
        assert _within(20, lambda: len(written.lines) == 2)
        assert re.fullmatch(r"second <\w+Error: .+>", written.lines[1])
    finally:
        djinn.init()


@pytest.mark.usefixtures("session")
def test_values_that_were_lost_with_a_connection_are_asked_for_again(server: Any) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", delaying_proxy.__name__, server.address.removeprefix("tcp://"), "0.2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    djinn.init(server=f"tcp://{process.stdout.readline().strip()}")
    try:
        x = torch.ones(3, device=DEVICE)
        djinn.synchronize()
        values = [djinn.later((x * number).sum()) for number in range(4)]
        assert not values[0].ready()
        # The batch has left, its values have not come.
        connection = djinn.ensure_initialized().backend.executors[0].connection
        while hasattr(connection, "plain") or hasattr(connection, "_connection"):
            connection = getattr(connection, "plain", None) or connection._connection
        time.sleep(0.3)
        connection._frames.stream._socket.shutdown(2)
        assert _within(20, lambda: sum(value.ready() for value in values) == len(values))
        assert [value.result().item() for value in values] == [0.0, 3.0, 6.0, 9.0]
        assert djinn.stats()["reconnections"] == 1
    finally:
        djinn.init()
        process.communicate(timeout=20)
