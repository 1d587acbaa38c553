"""A machine that reads tensors one after another, with other lines in between, to test prefetching."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from djinn.record.tensor import LazyTensor
from djinn_conformance.assertions import expect_same_tensor
from djinn_conformance.machine import Machine

__all__ = ("ReadingMachine",)

_LOOP = """
def read_{number}(tensors, pause, disturb):
    for position, tensor in enumerate(tensors):
        if position == pause:
            disturb()
        yield position, tensor.detach().cpu()
"""
_ROUNDS = """
def ask_{number}(look, pause, disturb, sums):
    for count in range(3):
        seen = look()
"""
_QUESTION = """
        if (count, {position}) == pause:
            disturb()
        if sums is not None:
            if {position} % 2 == 0:
                sums[{position}].add_(seen[{position}])
            elif count == pause[0]:
                sums[{position}].logical_not_()
            yield {position}, sums[{position}].clone().cpu()
        yield {position}, seen[{position}].clone().cpu()
"""
_ASKED = 3
_numbers = itertools.count()
_DISTURBING = ("write", "write", "view", "compute", "metadata", "mixed", "out", "gradient", "random_state", "read")


class ReadingMachine(Machine):
    """Draws programs that read their tensors in loops, as those do that save a model."""

    def _remote_names(self) -> list[str]:
        return [name for name in self.eager.tensors if isinstance(self.remote.space[name], LazyTensor)]

    @precondition(lambda self: len(self._remote_names()) > 1)
    @rule(data=st.data())
    def read_one_after_another(self, data: Any) -> None:
        """Read all remote tensors in a loop, and do something else in the middle of it."""
        self._read(data)

    @precondition(lambda self: len(self._remote_names()) > 1)
    @rule(data=st.data())
    def read_again(self, data: Any) -> None:
        """Read a value again."""
        self._read(data)

    def _read(self, data: Any) -> None:
        self._settle()
        names = self._remote_names()
        tensors = [self.remote.space[name] for name in names]
        pause = data.draw(st.integers(0, len(names)))
        groups = [group for group in _DISTURBING if self.groups.get(group)]

        def disturb() -> None:
            self._draw(data, data.draw(st.sampled_from(groups)))
            self._settle()

        before = self.session.stats()["prefetched"]
        with torch.no_grad():
            for position, got in _loop()(tensors, pause, disturb):
                self._compare(names[position], tensors[position], got)
        self.statistics.counts["prefetched"] += self.session.stats()["prefetched"] > before

    @precondition(lambda self: len(self._remote_names()) > 1)
    @rule(data=st.data())
    def ask_in_rounds(self, data: Any) -> None:
        """Ask for values of the same operations in each round, and do something else in the middle of one."""
        self._ask(data)

    @precondition(lambda self: len(self._remote_names()) > 1)
    @rule(data=st.data())
    def ask_in_rounds_again(self, data: Any) -> None:
        """Ask for values in rounds: a second rule makes values that were computed in advance frequent."""
        self._ask(data)

    def _ask(self, data: Any) -> None:
        self._settle()
        names = data.draw(st.permutations(self._remote_names()))[:_ASKED]
        pause = data.draw(st.sampled_from((1, 2, 0))), data.draw(st.sampled_from((1, *range(len(names)))))
        group = data.draw(st.sampled_from([group for group in _DISTURBING if self.groups.get(group)]))
        sends = data.draw(st.booleans())
        tensors = [self.remote.space[name] for name in names]
        eager = [self.eager.space[name] for name in names]
        sums = [[torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in side] for side in (tensors, eager)]
        writes = data.draw(st.booleans())
        asked: list[int] = []
        wanted: list[torch.Tensor] = []

        def look() -> list[torch.Tensor]:
            wanted[:] = [tensor.detach() for tensor in eager]
            return [tensor.detach() for tensor in tensors]

        def disturb() -> None:
            self._draw(data, group)
            self._settle()
            if sends:
                self.session.flush()

        before = self.session.stats()["prefetched"]
        with torch.no_grad():
            for position, got in _rounds(len(names))(look, pause, disturb, sums[0] if writes else None):
                self.history.append(f"# {names[position]} is asked for")
                asked.append(position)
                value = wanted[position]
                round_number, is_second = divmod(asked.count(position) - 1, 2)
                if writes and not is_second:
                    total = sums[1][position]
                    if position % 2 == 0:
                        total.add_(value)
                    elif round_number == pause[0]:
                        total.logical_not_()
                    value = total
                expect_same_tensor(got, value.clone().resolve_conj().resolve_neg(),
                                   f"{names[position]}, asked for in rounds", self._where())
        self.statistics.counts["foreseen"] += self.session.stats()["prefetched"] > before

    def _compare(self, name: str, tensor: torch.Tensor, got: torch.Tensor) -> None:
        # The line in between may have dropped the name, or given it to another tensor.
        if self.remote.space.get(name) is tensor:
            self.history.append(f"# {name} is read")
            wanted = self.eager.space[name].detach().resolve_conj().resolve_neg()
            expect_same_tensor(got, wanted, f"{name}, read in a loop", self._where())


def _loop() -> Callable[..., Iterator[tuple[int, torch.Tensor]]]:
    """Make a loop at a place of its own: where fetching in advance was in vain, it is not tried again soon."""
    number = next(_numbers)
    return _made(_LOOP.format(number=number), f"read_{number}")


def _rounds(count: int) -> Callable[..., Iterator[tuple[int, torch.Tensor]]]:
    """Make a loop that asks for so many values, each at a place of its own."""
    number = next(_numbers)
    questions = (_QUESTION.format(position=position) for position in range(count))
    return _made("".join((_ROUNDS.format(number=number), *questions)), f"ask_{number}")


def _made(source: str, name: str) -> Callable[..., Iterator[tuple[int, torch.Tensor]]]:
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, __file__, "exec"), space)  # noqa: S102  # a constant, and numbers
    return space[name]  # type: ignore[no-any-return]  # the function defined there
