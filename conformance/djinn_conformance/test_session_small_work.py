"""The law of sessions about small work on the client's data, which the client does itself with ``placement="cost"``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from djinn.kinds import Connection
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.session.connecting import connect
from djinn.session.session import Session
from djinn.wire.messages import Welcome
from djinn_conformance.assertions import bytes_of, describe, expect, expect_equal
from djinn_conformance.harness import other_connections
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.subjects import Subject
from djinn_plugins.common.calls.processor import processor_name
from djinn_plugins.common.device_report import device_of

_PROGRAMS = 60 if is_thorough() else 10
_STEPS = 18
_SIZE = (3, 4)
_Call = Callable[[torch.Tensor, torch.Tensor, int], Any]
_Step = tuple[str, int, int, int, int]

_UPLOADED: tuple[Callable[[int], torch.Tensor], ...] = (
    lambda n: torch.linspace(-2, 3 + n, 12), lambda n: torch.linspace(-1, 1, 12, dtype=torch.float64) ** 3 / (n + 1),
    lambda n: torch.tensor([0.1 * n, -0.0, math.inf, math.nan, 1e-40, 3e38, -1.5, 2.5, 0.5, 1 / 3, -7.0, -math.inf]),
    lambda n: torch.zeros(12), lambda n: (torch.arange(12.0) / 7 - n).half(),
    lambda n: (torch.arange(12.0) / 7 - n).bfloat16(), lambda n: torch.arange(12) - n,
)
_COMPUTED: tuple[_Call, ...] = (
    lambda a, b, n: a + b, lambda a, b, n: a - 0.1 * n, lambda a, b, n: a * b, lambda a, b, n: a / 3,
    lambda a, b, n: a / b, lambda a, b, n: 1 / (a.abs() + 0.1), lambda a, b, n: a.sqrt(), lambda a, b, n: a.square(),
    lambda a, b, n: torch.stack([a.float().round(), a.float().floor(), a.float().ceil(), a.float().trunc()])[n],
    lambda a, b, n: torch.relu(a).sign(), lambda a, b, n: a.sum(-1, keepdim=True) + b,
    lambda a, b, n: b * a.float().mean(), lambda a, b, n: a.cumsum(0), lambda a, b, n: a.t().sum(0).unsqueeze(1) - b,
    lambda a, b, n: torch.where(a > b, a, b), lambda a, b, n: a.clamp(-1, n + 0.5), lambda a, b, n: a.flip(0),
    lambda a, b, n: torch.cat([a[:1], b[1:]]), lambda a, b, n: a.masked_fill(a > n, n / 3),
    lambda a, b, n: torch.div(a, b + 0.3, rounding_mode="floor"), lambda a, b, n: a.to(torch.float16).to(torch.float64),
    # The client does not know these, and what follows from them.
    lambda a, b, n: a.float().exp(), lambda a, b, n: (a.double() @ b.double().t()) @ b.double(),
)
_WRITTEN: tuple[_Call, ...] = (
    lambda a, b, n: a.mul_(n), lambda a, b, n: a[n % 3].add_(1), lambda a, b, n: a.view(-1)[::2].neg_(),
    lambda a, b, n: a.copy_(b), lambda a, b, n: a.data.sub_(n), lambda a, b, n: torch._foreach_mul_([a], 2),
)
_ASKED: tuple[_Call, ...] = (
    lambda a, b, n: a.cpu(), lambda a, b, n: a.sum().item(), lambda a, b, n: a.float().mean().item(),
    lambda a, b, n: a.reshape(-1)[n].item(), lambda a, b, n: bool((a > b).any()), lambda a, b, n: (a / 3).cpu(),
    # Zeros, which are known, do not decide what the product is.
    lambda a, b, n: (torch.zeros(_SIZE, device=a.device) * (a.float().exp() / 0)).cpu(),
)
_KINDS = ("computed", "computed", "computed", "written", "asked")
_CALLS = {"computed": _COMPUTED, "written": _WRITTEN, "asked": _ASKED}


@law("session.small_work_exact")
def test_small_work_exact(subject: Subject, session: Session) -> None:
    """Run drawn programs without the placement, then with it, and then on a server that may compute otherwise."""
    programs = [_drawn(random.Random(seed)) for seed in range(_PROGRAMS)]
    wanted = [_answers(session.device, program) for program in programs]
    for agrees in (True, False):
        with _placed_by_cost(session, agrees=agrees):
            _check_trips(session, f"{subject}, {agrees=}")
            for program, answers in zip(programs, wanted, strict=True):
                for place, (mine, theirs) in enumerate(zip(_answers(session.device, program), answers, strict=True)):
                    expect(_bits(mine) == _bits(theirs), "the bits", got=describe(mine), wanted=describe(theirs),
                           where=f"{subject}, {agrees=}: answer {place} of {program}")
            if agrees and _computes_alike(session.backend.welcome):
                count = session.stats()["answered_at_home"]
                expect(count >= _PROGRAMS, "answers of the client", got=count, wanted="one in each program",
                       where=str(subject))


@contextmanager
def _placed_by_cost(session: Session, *, agrees: bool) -> Iterator[None]:
    """Connect the session anew, with the placement; the server may say that its kernels are not the client's."""

    def connections() -> list[Connection]:
        made = [connect(session.plugins, address) for address in session.config.addresses]
        return made if agrees else [_OtherKernels(plain) for plain in made]

    with other_connections(session, connections, placement="cost"):
        yield


class _OtherKernels(ConnectionWrapper):
    """A connection whose server has another release of PyTorch, as far as it says."""

    def __init__(self, plain: Connection) -> None:
        super().__init__(plain)
        self.welcome = msgspec.structs.replace(plain.welcome, torch=f"{plain.welcome.torch}.other")


def _check_trips(session: Session, where: str) -> None:
    """Check that small arithmetic costs no round trip where both compute alike, and everything else costs one."""
    on_reals = 0 if _computes_alike(session.backend.welcome) else 1
    small = torch.linspace(-1, 2, 12).view(_SIZE).to(session.device)
    large, many = torch.linspace(-1, 2, 2**18 + 1).to(session.device), torch.ones(2**15).to(session.device)
    asked: tuple[tuple[str, int, Callable[[], object]], ...] = (
        ("arithmetic", on_reals, lambda: ((small - small.mean()) / 3).sqrt().sum().item()),
        ("a value", on_reals, lambda: torch.relu(small).half().cpu()),
        ("integers", 0, (torch.arange(3, device=session.device) + 1).tolist),
        ("an exponential", 1, small.exp().cpu),
        ("a product of matrices", 1, lambda: torch.mm(small, small.t()).cpu()),
        ("what threads share", 1, lambda: many.sum().item()),
        ("an extreme of a large value", 1, lambda: large.amax().item()),
    )
    for what, trips, ask in asked:
        session.synchronize()
        before = session.stats()["round_trips"]
        ask()
        expect_equal(session.stats()["round_trips"] - before, trips, f"round trips for {what}", where)


def _computes_alike(welcome: Welcome) -> bool:
    device = device_of(welcome)
    return device.kind == "cpu" and device.name == processor_name() and welcome.torch == str(torch.__version__)


def _bits(answer: Any) -> object:
    """Return what tells answers apart: also zeros with a sign, and kinds of NaN in tensors."""
    if not isinstance(answer, torch.Tensor):
        return type(answer), repr(answer)
    return answer.dtype, answer.size(), bytes_of(answer)


def _drawn(choose: random.Random) -> list[_Step]:
    kinds = ["uploaded", "uploaded", *(choose.choice(_KINDS) for _ in range(_STEPS)), "asked"]
    return [(kind, choose.randrange(len(_CALLS.get(kind, _UPLOADED))), choose.randrange(100), choose.randrange(100),
             choose.randrange(4)) for kind in kinds]


def _answers(device: torch.device, program: Sequence[_Step]) -> list[Any]:
    """Run a program; return its answers, and the kinds of errors of calls that are refused."""
    values: list[torch.Tensor] = []
    answers: list[Any] = []
    for kind, chosen, first, second, number in program:
        if kind == "uploaded":
            values.append(_UPLOADED[chosen](number).view(_SIZE).to(device))
            continue
        try:
            made = _CALLS[kind][chosen](values[first % len(values)], values[second % len(values)], number)
        except RuntimeError as error:
            answers.append(type(error).__name__)
            continue
        if kind == "computed":
            values.append(made)
        elif kind == "asked":
            answers.append(made)
    return answers
