"""What would be silent is said once, with the user's line: waits in loops, models that leave, devices not used."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.processes.warm import run_python

import djinn
import djinn_plugins.watch.notices.backend
from djinn.errors import ConfigurationError
from djinn_plugins.common.tracing.waits import is_installed
from djinn_plugins.watch.notices.backend import LONG_S

DEVICE = "remote_accelerator:0"


@pytest.fixture(params=["in process", "served"])
def _somewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    address = request.getfixturevalue("server").address if request.param == "served" else None
    # A loop that a server runs ahead of does not wait.
    djinn.init(server=address, early_answers=False)
    yield
    djinn.init()


def _line(offset: int) -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


@pytest.mark.usefixtures("_somewhere")
def test_round_trips_are_counted_by_line() -> None:
    x = torch.ones(3, device=DEVICE)
    djinn.reset_stats()
    for turn in range(4):
        (x * turn).sum().item()
    x.cpu()
    table = djinn.stats(by="line")
    assert {line: waits.round_trips for line, waits in table.items()} == {_line(-3): 4, _line(-2): 1}
    assert sum(waits.round_trips for waits in table.values()) == djinn.stats()["round_trips"]
    assert sum(waits.bytes_received for waits in table.values()) == djinn.stats()["bytes_received"]
    assert all(waits.wait_s > 0 for waits in table.values())
    assert _line(-7) in str(table)
    djinn.reset_stats()
    assert not djinn.stats(by="line")
    with pytest.raises(ConfigurationError, match="DJ101"):
        djinn.stats(by="column")  # type: ignore[call-overload]  # what is tested


@pytest.mark.usefixtures("_somewhere")
def test_a_wait_inside_a_library_is_the_line_of_the_program_that_called_it() -> None:
    model = torch.nn.Linear(2, 2).to(DEVICE)
    djinn.reset_stats()
    torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    torch.save(model.state_dict(), Path("/dev/null"))
    assert set(djinn.stats(by="line")) == {_line(-2), _line(-1)}


class _Gate(torch.nn.Module):
    """Reads a number: a constant of what is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in (1.0, 2.0):
            if x.sum() > scale:
                x = x * scale
        return x


@pytest.mark.usefixtures("_somewhere")
def test_a_number_that_a_captured_model_reads_is_named_once_with_its_line() -> None:
    model, x = _Gate(), torch.ones(3, device=DEVICE)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", djinn.DjinnWarning)
        for _ in range(2):
            with djinn.capture(model):
                assert model(x).sum().item() == 6
        with djinn.capture():
            assert model(x).sum().item() == 6
        assert model(x).sum().item() == 6
    at = _Gate.forward.__code__.co_firstlineno + 2
    assert [(warning.filename, warning.lineno) for warning in seen] == [(__file__, at)] * 2
    assert "constant of the graph" in str(seen[0].message)


@pytest.mark.usefixtures("_somewhere")
def test_a_loop_that_waits_is_reported_once_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(djinn_plugins.watch.notices.backend, "LONG_S", 0.0)
    monkeypatch.setattr(djinn_plugins.watch.notices.backend, "SHARE", 0.01)
    x = torch.ones(3, device=DEVICE)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", djinn.DjinnWarning)
        for turn in range(49):
            (x * turn).sum().item()
        assert not seen
        for turn in range(49, 199):
            (x * turn).sum().item()
    [warning] = seen
    assert warning.category is djinn.DjinnWarning
    assert f"{warning.filename}:{warning.lineno}" == _line(-3)
    assert "has waited 50 times" in str(warning.message)
    assert "djinn.materialize" in str(warning.message)


@pytest.mark.usefixtures("_somewhere")
def test_a_loop_that_hardly_waits_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = itertools.count(1.0, LONG_S / 100)
    monkeypatch.setattr(djinn_plugins.watch.notices.backend, "perf_counter", lambda: next(clock_s))
    x = torch.ones(3, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", djinn.DjinnWarning)
        for turn in range(60):
            (x * turn).sum().item()


@pytest.mark.parametrize("is_served", [False, True])
def test_a_program_can_replace_the_clock(server: Any, is_served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def used_up(*_args: Any) -> float:
        raise StopIteration

    try:
        djinn.init(server.address if is_served else None)
        for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"):
            monkeypatch.setattr(time, name, used_up)
        x = torch.ones(3, device=DEVICE)
        assert [(x * turn).sum().item() for turn in range(60)] == [3.0 * turn for turn in range(60)]
        djinn.synchronize()
    finally:
        monkeypatch.undo()
        djinn.init()


@pytest.mark.usefixtures("_somewhere")
def test_a_library_that_moves_a_model_to_the_cpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "trainer.py"
    source.write_text("def prepare(model):\n    return model.to('cpu')\n")
    library = ModuleType("trainer")
    exec(compile(source.read_text(), str(source), "exec"), vars(library))
    monkeypatch.setattr(djinn_plugins.watch.notices.backend, "is_installed",
                        lambda file: file == str(source) or is_installed(file))
    model = torch.nn.Linear(2, 2).to(DEVICE)
    with pytest.warns(djinn.DjinnWarning, match=f"{source}:2") as seen:
        library.prepare(model)
    assert (seen[0].filename, seen[0].lineno) == (__file__, int(_line(-1).rpartition(":")[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", djinn.DjinnWarning)
        library.prepare(model.to(DEVICE))
        torch.nn.Linear(2, 2).to(DEVICE).cpu()


def test_a_device_that_the_server_does_not_use_is_refused(server: Any) -> None:
    try:
        with pytest.raises(ConfigurationError, match=r"\[DJ101\] .* 'cuda:0', but the server at .* uses cpu"):
            djinn.init(server=server.address, device="cuda:0")
        assert not djinn.is_initialized()
        djinn.init(server=server.address, device="cpu")
        assert torch.ones(1, device=DEVICE).item() == 1
    finally:
        djinn.init()


def _run(program: str, **environment: str) -> str:
    done = run_python(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_program_that_uses_no_session_that_it_began_is_told(server: Any) -> None:
    said = _run("import djinn, torch; djinn.init(); torch.ones(2).sum().item()", DJINN_SERVER=server.address)
    assert f"DjinnWarning: The session with {server.address} ran nothing" in said
    assert "djinn run" in said


def test_a_program_that_uses_its_session_is_told_nothing() -> None:
    assert _run("import torch, djinn; torch.ones(2, device='remote_accelerator:0').sum().item()") == ""


def test_a_program_that_used_another_session_before_is_told_nothing() -> None:
    assert _run("import torch, djinn; torch.ones(2, device='remote_accelerator:0').sum().item(); djinn.init()") == ""
