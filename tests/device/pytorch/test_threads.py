"""The executor computes with as many threads as the caller, and the first to use something may be several threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import WarmPython, clean_environment

import djinn

pytestmark = pytest.mark.usefixtures("in_process")
FIRST_USES = Path(__file__).parents[2] / "support" / "clients" / "first_uses.py"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    djinn.init()
    yield request.param
    torch.set_num_threads(before)
    djinn.shutdown()


def test_transforms_round_as_in_the_callers_thread(threads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7)
    for transform in (torch.fft.rfft, torch.fft.ihfft):
        assert torch.equal(transform(x.to("remote_accelerator:0")).cpu(), transform(x))


def test_a_number_that_is_changed_later_counts(threads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7)
    remote = x.to("remote_accelerator:0")
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        assert torch.equal(torch.fft.ihfft(remote).cpu(), torch.fft.ihfft(x))


def test_reductions_are_split_as_in_the_callers_thread(threads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300_000)
    assert torch.equal(x.to("remote_accelerator:0").sum().cpu(), x.sum())


@pytest.mark.parametrize("place", ["served", "here"])
def test_several_threads_may_be_the_first_to_use_something(server: Any, place: str, tmp_path: Path) -> None:
    environment = clean_environment(**({"DJINN_SERVER": server.address} if place == "served" else {}))
    log = tmp_path / "log"
    with WarmPython(FIRST_USES.read_text(), [], environment=environment, log=log, has_djinn=True) as process:
        assert process.stdout.read() == "done\n", log.read_text()
