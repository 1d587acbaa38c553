"""The law of sessions about what the client knows: integer values that are answered without asking the executor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_same_tensor
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.subjects import Subject

_EFFORT = 1.0 if is_thorough() else 0.3
_MAX_STEPS = 14
Call = Callable[[Any, Any, int], Any]

_MADE: tuple[Callable[[torch.device, int], torch.Tensor], ...] = (
    lambda device, n: torch.arange(n + 1, device=device),
    lambda device, n: torch.full((n + 1,), n - 2, device=device, dtype=torch.int32),
    lambda device, n: torch.ones(n + 1, device=device, dtype=torch.bool),
    lambda device, n: torch.tensor([n, 0, -n, 7][:n + 1]).to(device),
    lambda device, n: torch.tensor([[n % 2, 1], [0, 1]], dtype=torch.bool).to(device),
    lambda device, n: torch.full((n + 1,), 1.5, device=device),
    lambda device, n: torch.arange(n + 1, device=device) / 2,
    lambda device, n: torch.full((), n / 10, device=device), lambda device, n: torch.tensor(n - 0.5).to(device),
    lambda device, n: torch.full((1,), n / 3, device=device, dtype=torch.float64),
)
_CHOSEN: tuple[Call, ...] = (
    lambda a, b, n: a[a > n], lambda a, b, n: a.reshape(-1)[:b.numel()][(b.reshape(-1) != n)[:a.numel()]],
    lambda a, b, n: torch.cat([torch.unique(a), a.reshape(-1)[:1]]),
    lambda a, b, n: torch.stack([a, a])[:, a > n],
    lambda a, b, n: torch.bincount(a.reshape(-1).clamp(0, 3), minlength=n),
    lambda a, b, n: b.reshape(-1)[:1].repeat_interleave(a.reshape(-1)[:1].clamp(0, 3)),
)
"""Their sizes depend on data."""
_COMPUTED: tuple[Call, ...] = (
    lambda a, b, n: a + n, lambda a, b, n: a * n - a, lambda a, b, n: a == n, lambda a, b, n: (a < 1).any(),
    lambda a, b, n: (a != 0).all(), lambda a, b, n: a.reshape(-1)[:2],
    lambda a, b, n: a.unsqueeze(0).expand(2, *a.shape),
    lambda a, b, n: torch.cat([a.reshape(-1), torch.ones(n + 1, device=a.device, dtype=a.dtype)]),
    lambda a, b, n: torch.cat([a.reshape(-1), b.reshape(-1).to(a.dtype)]),
    lambda a, b, n: torch.where(a > 0, b.reshape(-1)[0], b.reshape(-1)[-1]),
    lambda a, b, n: torch.isin(a, b), lambda a, b, n: a.to(torch.int8), lambda a, b, n: a.to(torch.float32) / 3,
    lambda a, b, n: a.sum(), lambda a, b, n: a.cumsum(0), lambda a, b, n: a & (b.reshape(-1)[0] > 0),
    lambda a, b, n: a.max(), lambda a, b, n: a.masked_fill(a > 1, n),
    lambda a, b, n: a.t() if a.dim() == 2 else a.flip(0),
    lambda a, b, n: torch.zeros_like(a) - n, lambda a, b, n: a // max(n, 1), lambda a, b, n: a.argmax(),
    # Whatever the other operand is, and nobody knows it, one decides.
    lambda a, b, n: (a == n) | (b.reshape(-1)[0] * 1.5 > n), lambda a, b, n: (b.reshape(-1)[0] * 1.5).long() & (a != n),
    lambda a, b, n: (a * 0.5).long() * (b.reshape(-1)[0] - n),
    lambda a, b, n: torch.logical_and(a * 1.5 < n, a), lambda a, b, n: torch.logical_or(a, b.reshape(-1)[0] / 2),
    lambda a, b, n: a.reshape(-1)[b.reshape(-1)[:1].long() % a.numel()], lambda a, b, n: torch.stack([a, a]),
    *_CHOSEN,
)
_WRITTEN: tuple[Call, ...] = (
    lambda a, b, n: a.fill_(n), lambda a, b, n: a.add_(1), lambda a, b, n: a.view(-1)[-1:].zero_(),
    lambda a, b, n: a.detach().copy_(b.reshape(-1)[0].clone()), lambda a, b, n: a.masked_fill_(a == n, 3),
    lambda a, b, n: a.set_(b), lambda a, b, n: torch._foreach_add_([a], 1), lambda a, b, n: a.data.mul_(2),
    lambda a, b, n: a.view(-1)[n:].add_(1), lambda a, b, n: a.view(-1)[::2].mul_(n), lambda a, b, n: a.sub_(n, alpha=3),
    lambda a, b, n: a.copy_(b), lambda a, b, n: torch._foreach_mul_([a, a.clone()], n), lambda a, b, n: a.mul_(0.3),
    lambda a, b, n: a.set_(b.untyped_storage(), n, a.size(), a.stride()),
)
_ASKED: tuple[Call, ...] = (
    lambda a, b, n: a.cpu(), lambda a, b, n: a.reshape(-1)[0].item(),
    lambda a, b, n: bool((a == b.reshape(-1)[0]).any()),
    lambda a, b, n: a.tolist(), lambda a, b, n: torch.equal(a, b), lambda a, b, n: int(a.sum()),
    lambda a, b, n: a.unsqueeze(0).expand(2, *a.shape).cpu(),
)
_STEPS = (("made",), ("computed",), ("computed",), ("written",), ("asked",), ("asked again",),
          ("asked", "written there", "asked", "asked before"))
_REFUSED = object()
_GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "made": _MADE, "real": _MADE[5:7], "computed": _COMPUTED, "chosen": _CHOSEN, "written": _WRITTEN, "asked": _ASKED,
    "numbers": _ASKED[1:2]}


@law("session.known_exact", effort=_EFFORT, shrinks=False)
@pytest.mark.filterwarnings("ignore:Use of masked_fill_")
@given(data=st.data())
def test_known_exact(subject: Subject, session: Session, data: st.DataObject) -> None:
    """Draw programs of small integers and real numbers, with writes through aliases among them, and ask for values.

    The same is asked again and again, because the client remembers some of the answers.
    """
    cpu, history = torch.device("cpu"), [""]
    pools: dict[torch.device, list[Any]] = {cpu: [], session.device: []}
    kinds = ["made", *chain(*data.draw(st.lists(st.sampled_from(_STEPS), max_size=_MAX_STEPS))), "asked again"]
    asked = [(0, 0, 0, 0)]
    for step in kinds:
        kind = step.partition(" ")[0]
        if step == "asked before":
            chosen, first, second, number = asked[-2]
        elif step == "asked again":
            chosen, first, second, number = data.draw(st.sampled_from(asked))
            if data.draw(st.booleans()):
                first = data.draw(st.integers(0, len(pools[cpu]) - 1))
        else:
            chosen = data.draw(st.integers(0, len(_GROUPS[kind]) - 1))
            first, second = (data.draw(st.integers(0, max(0, len(pools[cpu]) - 1))) for _ in range(2))
            number = data.draw(st.integers(0, 3))
            first = asked[-1][1] if step == "written there" else first
        if kind == "asked":
            asked.append((chosen, first, second, number))
        history.append(f"{kind} {chosen} of {first}, {second} and {number}")
        where = f"{subject}: {'; '.join(history)}"
        wanted = _outcome(pools[cpu], cpu, kind, chosen, first, second, number)
        if wanted is not _REFUSED:
            got = _outcome(pools[session.device], session.device, kind, chosen, first, second, number)
            if isinstance(wanted, torch.Tensor):
                expect_same_tensor(got, wanted, "the value", where)
            else:
                expect(type(got) is type(wanted) and got == wanted, "the value", got=got, wanted=wanted, where=where)
    for mine, ours in zip(pools[session.device], pools[cpu], strict=True):
        expect_same_tensor(mine.cpu(), ours, "a value at the end", "; ".join(history))


def _outcome(
    pool: list[Any], device: torch.device, kind: str, chosen: int, first: int, second: int, number: int,
) -> Any:
    """Do one thing; return what a question gives, or that eager refuses the call."""
    try:
        call = _GROUPS[kind][chosen]
        made = call(device, number) if kind == "made" else call(pool[first], pool[second], number)
    except Exception:
        if device.type != "cpu":
            raise
        return _REFUSED
    if kind in {"made", "computed"}:
        pool.append(made)
    return made if kind == "asked" else None
