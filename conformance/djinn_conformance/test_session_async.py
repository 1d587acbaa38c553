"""The law of sessions about event loops: tasks share a session, and some of their calls are cancelled."""

from __future__ import annotations

import importlib.util
import random

import anyio
import anyio.lowlevel
import pytest
import torch

from djinn.errors import OperationCancelledError
from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_same_tensor
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.subjects import Subject
from djinn_plugins.sessions.asynchronous.face import materialize_async

_LOOPS = [name for name in ("asyncio", "trio") if importlib.util.find_spec(name)]
_TASKS, _ROUNDS = 6, 4
_SEEDS = 20 if is_thorough() else 2


@law("session.awaited_equal")
@pytest.mark.parametrize("loop", _LOOPS)
def test_awaited_equal(subject: Subject, session: Session, loop: str) -> None:
    """Let tasks compute on tensors that they share; cancel some calls after a drawn number of turns of the loop."""
    for seed in range(_SEEDS):
        anyio.run(_compute, session, random.Random(seed), f"{subject}: seed {seed}", backend=loop)


async def _compute(session: Session, choose: random.Random, where: str) -> None:
    factor = torch.full((32, 32), 1 / 32)
    there = factor.to(session.device)

    async def work(number: int) -> None:
        for turns in [choose.choice((None, 0, 1, 2, 5, 20)) for _ in range(_ROUNDS)]:
            ours, theirs = factor + number, there + number
            for _ in range(choose.randrange(1, 30)):
                ours, theirs = ours @ factor, theirs @ there
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    if turns is not None:
                        tasks.start_soon(_cancel_after, scope, turns)
                    await _check(ours, theirs, where)
                    tasks.cancel_scope.cancel()
            await _check(ours, theirs, where)

    async with anyio.create_task_group() as tasks:
        for number in range(_TASKS):
            tasks.start_soon(work, number)
    expect_same_tensor(await materialize_async(there * 3), factor * 3, "the value at the end", where)


async def _cancel_after(scope: anyio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def _check(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    try:
        got = await materialize_async(theirs)
    except OperationCancelledError as error:
        expect("cancelled" in str(error), "what a cancelled value says", got=error, wanted="cancelled", where=where)
    else:
        expect_same_tensor(got, ours, "the value", where)
