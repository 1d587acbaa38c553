"""A backend that does not ask for what the client knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch

from djinn.ir.program import ProgramLayout
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Signature, Tape
from djinn.ir.value import Slot
from djinn.kinds import Backend, BackendContext, Connection, OpenBackend, SubmissionCache
from djinn.kinds.backend_wrapper import BackendWrapper
from djinn.kinds.classifier import SupportsEffects
from djinn.wire.messages import GENERATOR_HANDLE, Welcome
from djinn_plugins.client.known_values.answers import RememberedAnswers
from djinn_plugins.client.known_values.arithmetic import HOME_BYTES, REALS, computes_alike
from djinn_plugins.client.known_values.companions import Companions
from djinn_plugins.client.known_values.operators import (
    Rule,
    has_exact_numbers,
    is_followed_upload,
    is_integer_spec,
    rule_of,
)
from djinn_plugins.client.known_values.sizes import SizesAsked
from djinn_plugins.client.known_values.values import KnownValues
from djinn_plugins.client.wishes import Wishes

__all__ = ("KnowingBackend", "open_knowing")

_T = TypeVar("_T")
COMPUTED_LIMIT = 256
"""How many times as large a value may be as one that is kept, if it is only computed when a program asks: the mask of a
batch follows from the numbers of its positions.
"""
MAX_RULES = 8192
"""Signatures whose rule is remembered."""
MAX_SEGMENTS = 512
"""Repeated segments whose effects are remembered."""
_Kind: TypeAlias = tuple[Any, ...]
_Place: TypeAlias = tuple[int, int]
"""Position of a node, and of one of its operands or results."""
_Effects: TypeAlias = tuple[tuple[_Place, ...], tuple[tuple[_Place, _Place], ...], bool]
"""What a segment does to values from outside: operands that it writes; operands whose storage a result shares, each
with that result; and whether a written value may have another storage afterwards.
"""


class KnowingBackend(BackendWrapper):
    """Follows small integers, truth values and single real numbers from uploads and constants on, and answers for them.

    It also repeats answers about other values, until these are written: see `RememberedAnswers`. It looks at recorded
    operations when something is about to be sent or asked for, never while they are recorded.

    Args:
        plain: The backend that does the work.
        tape: The session's tape.
        released: Numbers of values that the program no longer refers to.
        wishes: What the session's layers would like to have.
        hides: Says whether an operator may have effects that its schema does not declare; ``None`` if that is unknown.
        limit_bytes: Size of the largest integer value that is kept.
        takes_reals: Whether real numbers are followed, too, as long as all executors compute as this process does.

    Concurrency:
        The caller holds the session's lock. Other threads may append to the tape; if they did so unseen, everything
        is dropped.

    Laws:
        session.known_exact
    """

    def __init__(self, plain: Backend, tape: Tape, released: deque[int], wishes: Wishes,
                 hides: Callable[[torch._ops.OpOverload], bool] | None, limit_bytes: int,
                 *, takes_reals: bool = False) -> None:
        super().__init__(plain)
        self._tape = tape
        self._released = released
        self._hides = hides or _hides_nothing
        self._limit_bytes = limit_bytes
        self._known = KnownValues(limit_bytes)
        self._answers = RememberedAnswers(self._rule, is_on=hides is not None)
        self._wishes = wishes
        self._companions = Companions(self._known, self._wishes)
        self._may_take_reals = takes_reals
        self._takes_reals = False
        self._welcomes: list[Welcome] = []
        self._rules: dict[Signature, Rule] = {}
        self._alike: dict[_Kind, Rule] = {}
        self._effects: dict[int, tuple[Sequence[Node], _Effects]] = {}
        self._looked_at = 0, 0
        """How many released values were looked at, and the last of them."""
        self._seen = 0
        """How many nodes were seen: all that were taken off the tape, and those that were on it then."""
        self._computed = 0

    def flush(self) -> None:
        """Send everything pending."""
        self._sent(self.plain.flush)

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values, unless the client knows all of them."""
        self._look()
        values = self._known.read(slots)
        if values is not None:
            self._computed += 1
            return values
        question = self._answers.question(slots[0]) if len(slots) == 1 else None
        if question is not None and (known := self._answers.answer(question)):
            return known
        try:
            with self._companions.of(slots):
                values = self._asked(lambda: self.plain.fetch(slots, whole=whole))
        finally:
            if not whole and self.nodes_taken + len(self._tape) != self._seen:
                # A slice may have been taken that contains what another thread has recorded meanwhile.
                self._forget()
        self._answers.heard(self._tape.nodes)
        if question is not None:
            self._answers.remember(question, values[0])
        for slot, value in zip(slots, values, strict=True):
            if slot.number != GENERATOR_HANDLE:
                self._known.learn(slot, value)
        return values

    def known(self, slot: Slot) -> Any:
        """Return a value without asking any executor, for the caller to own; ``None`` if no layer knows it."""
        self._follow()
        values = self._known.read([slot])
        return None if values is None else values[0]

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values, unless the client knows it."""
        self._look()
        # A question about no value waits for whether the operations fail.
        nodes = self._tape.nodes
        if slots and nodes:
            asked = SizesAsked(self._known, slots, nodes[-1], self.welcome.device == "cpu")
            known = asked.answer()
            if known is not None:
                self._computed += 1
                return known
            # What the sizes depend on tells more than they do, at the same wait.
            if (lacking := asked.lacking()) and (told := self._tell(asked, lacking)) is not None:
                return told
        items = self._asked(lambda: self.plain.describe(slots))
        self._answers.heard(self._tape.nodes)
        return items

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._sent(self.plain.synchronize)
        self._answers.heard(self._tape.nodes)

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor, and keep a copy if it is small."""
        self._sent(lambda: self.plain.upload(number, dense, device))
        is_followed = is_followed_upload(dense, self._limit_bytes)
        is_followed |= self._takes_reals and dense.dtype in REALS and dense.nbytes <= HOME_BYTES
        if number != GENERATOR_HANDLE and is_followed:
            with torch.inference_mode(mode=False):
                self._known.put(number, dense.detach().clone())

    def seed(self, seed: int) -> None:
        """Seed the random numbers, after everything pending."""
        self._sent(lambda: self.plain.seed(seed))

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a segment again that was recorded before; its results are not followed."""
        self._sent(lambda: self.plain.run(nodes, released, layout))
        if self._known or self._answers:
            self._note_repeated(nodes, released)

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the caches of results, and use others."""
        self._sent(lambda: self.plain.use_cache(open_cache))

    def stats(self) -> Mapping[str, int]:
        """Return the counters, and how many questions the client has answered itself."""
        return {**self.plain.stats(), "answered_at_home": self._computed + self._answers.given}

    def cancel(self) -> None:
        """Cancel the submitted work: what it would have written is as it was."""
        self._forget()
        self.plain.cancel()

    def close(self) -> None:
        """Close the connections."""
        self._forget()
        self.plain.close()

    def _tell(self, asked: SizesAsked, lacking: Sequence[Slot]) -> list[Any] | None:
        """Send everything pending, fetch values, and return the sizes that depend on them."""
        with self._wishes.refused():
            values = self._asked(lambda: self.plain.fetch(lacking, whole=True))
        self._answers.heard(self._tape.nodes)
        for slot, value in zip(lacking, values, strict=True):
            self._known.learn(slot, value)
        return asked.answer()

    def _sent(self, action: Callable[[], _T]) -> _T:
        self._look()
        return self._asked(action)

    def _asked(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except BaseException:
            # A write that was refused or cancelled has changed nothing.
            self._forget()
            raise

    def _look(self) -> None:
        """Look at the nodes that were recorded since the last time, and at the values that died."""
        # First: whatever uses or makes a value that is dead by now is on the tape already.
        dead = [*self._newly_released(), *self._companions.freed()]
        self._follow()
        self._known.release(dead)
        self._answers.died(dead)

    def _newly_released(self) -> list[int]:
        """List the values that died since the last time; the backend that sends them takes them from the left."""
        released, (count, last) = self._released, self._looked_at
        try:
            start = count if count and released[count - 1] == last else 0
        except IndexError:
            start = 0
        found = [*islice(released, start, None)]
        if found:
            self._looked_at = start + len(found), found[-1]
        return found

    def _follow(self) -> None:
        """Look at the nodes that were recorded since the last time."""
        if self._may_take_reals:
            self._compare()
        taken = self.nodes_taken
        start = self._seen - taken
        if start < 0:
            # Another thread has recorded nodes that were sent before they were seen.
            self._forget()
            start = 0
        nodes = self._tape.nodes[start:]
        self._seen = taken + start + len(nodes)
        self._answers.recorded(nodes)
        for node in nodes:
            rule = self._rules.get(node.signature) or self._rule(node.signature)
            if rule is Rule.NOTHING:
                continue
            if rule is Rule.COMPUTES:
                if self._takes_reals or has_exact_numbers(node):
                    self._known.compute(node)
            elif rule is Rule.UPDATES and has_exact_numbers(node) and self._known.update(node):
                for place in node.signature.writes:
                    self._answers.written(node.inputs[place])
            elif rule is Rule.MOVES and self._known.move(node):
                for slot in node.inputs:
                    self._answers.written(slot)
            elif self._known or self._answers:
                specs = () if rule.hides else node.signature.operands
                for place in range(len(node.inputs)) if rule.hides else node.signature.writes:
                    # A tensor that was given another storage has left the one that it had.
                    self._known.written(node.inputs[place], specs[place] if place < len(specs) else None)
                    self._answers.written(node.inputs[place])

    def _compare(self) -> None:
        """Look whether all executors compute as this process does; a recovery may have brought others."""
        welcomes = [executor.welcome for executor in self.executors]
        if welcomes != self._welcomes:
            self._welcomes = welcomes
            self._takes_reals = self._known.computes_alike = all(map(computes_alike, welcomes))
            self._rules.clear()
            self._alike.clear()
            self._known.clear()

    def _rule(self, signature: Signature) -> Rule:
        rule = self._rules.get(signature)
        if rule is None:
            if len(self._rules) >= MAX_RULES:
                self._rules.clear()
            # A loop over the elements of a tensor makes signatures that differ only in where these begin.
            kind = (signature.template_number, signature.is_random, _layouts(signature.operands),
                    _layouts(signature.results))
            rule = self._alike.get(kind)
            if rule is None:
                if len(self._alike) >= MAX_RULES:
                    self._alike.clear()
                rule = self._alike[kind] = rule_of(
                    signature, COMPUTED_LIMIT * self._limit_bytes, self._hides, takes_reals=self._takes_reals)
            self._rules[signature] = rule
        return rule

    def _note_repeated(self, nodes: Sequence[Node], released: set[int]) -> None:
        """Drop the values that a repeated segment writes or aliases; its slots do not say what they alias."""
        # Held with its nodes, so that their identity cannot pass to others.
        kept = self._effects.get(id(nodes))
        if kept is None:
            if len(self._effects) >= MAX_SEGMENTS:
                self._effects.clear()
            kept = self._effects[id(nodes)] = nodes, self._effects_of(nodes)
        written, shared, moves = kept[1]
        shares = any(nodes[by].outputs[result].number not in released for _, (by, result) in shared)
        self._answers.ran(writes=bool(written), shares=shares)
        for index, place in written:
            signature = nodes[index].signature
            if place < len(signature.operands) and self._known.storage_of(nodes[index].inputs[place].number) is None:
                # It may share its storage with a value that was fetched, or written.
                if is_integer_spec(signature.operands[place]):
                    self._known.clear()
                else:
                    self._known.forget_reals()
            self._written(nodes[index].inputs[place], stays=not moves)
        for (index, place), (by, result) in shared:
            if nodes[by].outputs[result].number not in released:
                self._written(nodes[index].inputs[place], stays=False)

    def _effects_of(self, nodes: Sequence[Node]) -> _Effects:
        """Find out what a segment does to values from outside."""
        outside: dict[int, _Place | None] = {}
        written: dict[_Place, None] = {}
        shared: list[tuple[_Place, _Place]] = []
        moves = False
        for index, node in enumerate(nodes):
            signature = node.signature
            rule = self._rule(signature)
            moves |= rule.hides
            found = [outside.setdefault(slot.number, (index, place)) for place, slot in enumerate(node.inputs)]
            changed = range(len(found)) if rule.hides else signature.writes
            written |= {place: None for each in changed if (place := found[each]) is not None}
            for result, (slot, alias) in enumerate(zip(node.outputs, signature.aliases, strict=False)):
                place = outside[slot.number] = found[alias] if alias >= 0 else None
                if place is not None:
                    shared.append((place, (index, result)))
        return tuple(written), tuple(shared), moves

    def _written(self, slot: Slot, *, stays: bool) -> None:
        self._known.written_storage(self._known.storage_of(slot.number) or 0, stays=stays)

    def _forget(self) -> None:
        self._known.clear()
        self._answers.forget()


def open_knowing(opens: OpenBackend, context: BackendContext, limit_bytes: int, takes_reals: bool,
                 connections: Sequence[Connection], tape: Tape, released: deque[int]) -> Backend:
    """Open a backend, and wrap it."""
    classifier = context.classifier
    hides = classifier.hides_effects if isinstance(classifier, SupportsEffects) else None
    return KnowingBackend(opens(connections, tape, released), tape, released, context.shared(Wishes), hides,
                          limit_bytes, takes_reals=takes_reals)


def _layouts(specs: Sequence[TensorSpec | None]) -> tuple[Any, ...]:
    return tuple([None if spec is None else (spec.dtype, spec.size, spec.stride) for spec in specs])


def _hides_nothing(_: torch._ops.OpOverload) -> bool:
    return False
