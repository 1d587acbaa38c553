"""Chosen plugins: an executor with the required methods only is served, and no choice is ignored in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.least_executor import LeastFactory
from support.servers.serving import Serving

import djinn
import djinn.plugins
from djinn.errors import PluginError, ProgramTooLargeError
from djinn.plugins import Plugins

TESTS = str(Path(__file__).parents[1])
LEAST = f"""
import sys
sys.path.insert(0, {TESTS!r})
import djinn.plugins
from support.servers.least_executor import LeastFactory
djinn.plugins.register(LeastFactory(), "executor")

class Writing(LeastFactory):
    name = "writing"

    def open(self, device):
        return open("no such folder/log", "a")

djinn.plugins.register(Writing(), "executor")
"""
MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("chosen")
    with Serving(folder / "log", "--plugins", "executor=least,scheduler=single", "--program-mib", "64", prelude=LEAST,
                 ) as serving:
        yield serving


@pytest.fixture
def device(server: Serving) -> Iterator[torch.device]:
    torch.set_num_threads(1)
    yield djinn.init(server.address).device
    djinn.shutdown()


def trained(device: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(),
                                torch.nn.Linear(48, 4)).to(device)
    data = torch.linspace(-1, 1, 4 * 2 * 6 * 6).view(4, 2, 6, 6).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return [value.cpu() for value in model.state_dict().values()]


def test_an_executor_without_optional_methods_trains_as_eager_does(device: torch.device) -> None:
    for got, wanted in zip(trained(device), trained("cpu"), strict=True):
        assert torch.equal(got, wanted)


def test_its_calls_are_checked_one_by_one_and_others_are_computed(device: torch.device) -> None:
    table, beyond = torch.arange(6.0, device=device).view(3, 2), torch.tensor([7], device=device)
    before, wrong, after = table * 2, table.index_select(0, beyond), table + 1
    late = wrong + 1
    table.scatter_(0, beyond.view(1, 1), 5.0)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        late.cpu()
    assert torch.equal(before.cpu() + 2, after.cpu() * 2)
    assert torch.equal(table.cpu(), torch.arange(6.0).view(3, 2)), "a call that was refused has written nothing"


def test_its_kernels_write_into_views_with_gaps_through_copies(device: torch.device) -> None:
    def written(place: Any) -> list[torch.Tensor]:
        memory = torch.zeros(4, 6, device=place)
        torch.cumsum(torch.ones(4, 3, device=place), 0, out=memory[:, ::2])
        return [memory.cpu(), torch.linalg.qr(torch.eye(3, device=place).mT)[0].cpu()]

    for got, wanted in zip(written(device), written("cpu"), strict=True):
        assert torch.equal(got, wanted)


def test_a_step_that_is_too_large_is_left_out_and_the_others_run(device: torch.device) -> None:
    small = torch.ones(3, device=device)
    large, beside = torch.ones(32 * MIB, device=device), small * 2
    with pytest.raises(ProgramTooLargeError):
        large.sum().item()
    assert beside.tolist() == [2.0, 2.0, 2.0]


def test_a_server_names_choices_that_have_no_effect_there(server: Serving) -> None:
    assert "chooses scheduler=single, which has no effect here: sessions use it" in server.log.read_text()


@pytest.mark.parametrize(("plugins", "said"), [
    ("executor=writing", r"\[DJ201\] A worker could not begin: FileNotFoundError: .*line \d+\)\. In a worker's sand"),
    ("transport=unix", "carries unix://, and this server listens on tcp://.* Give --listen unix://"),
    ("guard=no-such", "There is no guard named 'no-such'"), ("transport=tpc", "There is no transport named 'tpc'")])
def test_a_server_refuses_what_it_cannot_use(plugins: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said) as caught:
        Serving(tmp_path / "log", "--plugins", plugins, prelude=LEAST)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(("choice", "said"), [
    ("guard=core", "a server uses it"), ("memory=tiered", "a server uses it"), ("metrics=prometheus", "a server uses"),
    ("engine=local", "djinn cluster up"), ("mode=cuda", "djinn run uses it"), ("cache=results", "no results are kept"),
    ("transport=tcp", "it carries tcp://, and the session uses local")])
def test_a_session_names_choices_that_have_no_effect(choice: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "djinn.plugins"):
        djinn.init(plugins=choice)
    djinn.shutdown()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "djinn.plugins"]
    assert f"chooses {choice}, which has no effect here: {said}" in line


def test_an_executor_that_is_chosen_beside_a_server_is_named(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "djinn.plugins"):
        djinn.init(server.address, plugins="executor=cpu")
    djinn.shutdown()
    assert "executor=cpu, which has no effect here: the server has an executor of its own" in caplog.text


@pytest.mark.parametrize("choice", ["transport=tpc", "pattern=no-such", "scheduler=no-such"])
def test_a_choice_that_does_not_exist_is_an_error(choice: str) -> None:
    with pytest.raises(PluginError, match=f"There is no {choice.partition('=')[0]} named"):
        djinn.init(plugins=choice)


class Other:
    name = "other"

    def __getattr__(self, name: str) -> Any:
        return getattr(Plugins.load(names=["djinn-interceptor-device"]).choose("interceptor"), name)


def test_an_interceptor_is_chosen_by_the_environment_alone(caplog: pytest.LogCaptureFixture) -> None:
    take_back = djinn.plugins.register(Other(), "interceptor")
    try:
        djinn.init(plugins="interceptor=other")
        djinn.shutdown()
    finally:
        take_back()
    assert "interceptor=other, of which only the handlers are used: device was installed" in caplog.text


class Failing:
    name = "failing"

    def observe(self, stats: Any) -> None:
        raise ZeroDivisionError("no reason")


class Hooks:
    """A plugin whose hook fails at the end of a session."""

    @staticmethod
    @djinn.hookspecs.hookimpl
    def djinn_session_closed() -> None:
        raise KeyError("no reason")


class Seeing:
    def __init__(self) -> None:
        self.name, self.seen = "seeing", 0

    def observe(self, stats: Any) -> None:
        self.seen += 1


def test_an_observer_and_a_hook_that_fail_harm_neither_the_program_nor_each_other(
    caplog: pytest.LogCaptureFixture
) -> None:
    seeing = Seeing()
    taken_back = [djinn.plugins.register(plugin) for plugin in (Failing(), Hooks(), seeing)]
    try:
        djinn.init()
        djinn.shutdown()
    finally:
        for take_back in taken_back:
            take_back()
    failed = [record.getMessage() for record in caplog.records if "at the end of a session" in record.getMessage()]
    assert sorted(failed) == ["the observer failing failed at the end of a session",
                              "the plugin in-process-Hooks failed at the end of a session"]
    assert seeing.seen == 1
    assert not djinn.is_initialized()


def test_the_least_executor_is_what_its_page_requires() -> None:
    opened = LeastFactory().open("")
    assert {name for name in dir(opened) if name[0] != "_"} == {
        "name", "device", "compile", "put", "get", "random_state", "close"}
