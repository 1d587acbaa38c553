"""A state machine that draws programs and runs each of them twice, eagerly and on the remote device."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import djinn
from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_equal, violated
from djinn_conformance.differential import (
    EagerLine,
    Twin,
    brought_home,
    compare_metadata,
    compare_values,
    eager_twin,
    payload,
    remote_twin,
    settle,
    version_offset,
)
from djinn_conformance.program_forms import Drawer, table

__all__ = ("FLUSHES", "Machine", "Statistics")

FLUSHES = ("auto", None, 1, 2, 7)
"""After how many operations a program submits; "auto" is the session's own choice, ``None`` is never."""
_INFERENCE = "with torch.inference_mode(): "
_MODES = (*[""] * 10, "with torch.no_grad(): ", _INFERENCE, "with torch.enable_grad(): ")
_MOST_NAMES = 10
_GROUPS_OF_WORKERS = ("view", "write", "compute", "read", "write", "metadata", "gradient")
_NOT_REPEATABLE = ("gradient", "mixed", "random", "random_state", "sliced")
"""Groups of lines that may write and then wait: if the wait raises an earlier failure, they can no longer be
repeated.
"""
_PLAIN_GROUPS = ("late", "refused", "random_state")
"""Groups whose lines run without a special mode."""


@attrs.define
class Statistics:
    """Counts of drawn programs and events.

    Attributes:
        programs: How many programs ran to their end.
        different: How many differed from eager.
        counts: How often something happened: lines by group, how they ended, threads, flush settings.
        forms: How often each form had a result, by its text.
    """

    programs: int = 0
    different: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    forms: Counter[str] = attrs.field(factory=Counter)
    tried: Counter[str] = attrs.field(factory=Counter)

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{self.programs} programs, none different: {counted}; {len(self.forms)} forms of lines"


@contextmanager
def _flushing(session: Session, every: int | None | str) -> Iterator[None]:
    """Set after how many operations a running session submits; starting a session per program would take too long."""
    session.flush_after(every)
    try:
        yield
    finally:
        session.flush_after(session.config.flush_every)


class Machine(RuleBasedStateMachine):
    """Draws programs for one session.

    Attributes:
        keeps_apart: Whether writes avoid tensors that overlap themselves, because servers refuse such writes.
    """

    keeps_apart = False

    def __init__(self, session: Session, statistics: Statistics) -> None:
        super().__init__()
        self.session = session
        self.statistics = statistics
        self.groups = table().groups
        self.history: list[str] = []
        self.again: list[EagerLine] = []
        self.pending: list[type[BaseException]] = []
        self.held: list[torch.Tensor] = []
        self.offsets: dict[str, int] = {}
        self.names = 0
        self._drain()
        self.handles = self._wanted_handles()
        self.flushing = _flushing(session, "auto")
        self.flushing.__enter__()
        torch.manual_seed(0)
        self.eager, self.remote = eager_twin(), remote_twin(session.device)

    def _wanted_handles(self) -> int:
        """Count the values that the executor holds for live tensors."""
        stats = self.session.stats()
        return stats["live_handles"] - stats["results_kept"]

    def _drain(self) -> None:
        """Clean up after an earlier failed program."""
        for _ in range(10):
            try:
                djinn.synchronize()
            except Exception:  # noqa: BLE001, S112  # it has been reported
                continue
            return

    @initialize(data=st.data(), every=st.sampled_from(FLUSHES), seed=st.integers(0, 9))
    def begin(self, data: Any, every: int | None | str, seed: int) -> None:
        """Choose when to submit, and create tensors."""
        self.flushing.__exit__(None, None, None)
        self.flushing = _flushing(self.session, every)
        self.flushing.__enter__()
        self.statistics.counts[f"flush_every={every}"] += 1
        self._do(f"torch.manual_seed({seed}) and None", "random_state")
        self._do("filled((2, 3), torch.float32, 1).to(device, copy=True)", "create")
        self._do("filled((3, 3), torch.float32, 2).to(device, copy=True).requires_grad_()", "create")
        self._do("filled((2, 3), torch.float32, 3)", "mixed")
        for _ in range(2):
            self._draw(data, "create")

    def _where(self) -> str:
        return "line " + str(len(self.history)) + ": " + (self.history[-1] if self.history else "")

    def _new_name(self, form: str) -> Callable[[], str]:
        is_local = "'cpu'" in form or (form.startswith(("filled(", "{v}.", "{v}[")) and ".to(device" not in form)

        def name() -> str:
            self.names += 1
            return f"{'c' if is_local else 't'}{self.names}"

        return name

    def _draw(self, data: Any, group: str) -> None:
        """Draw a line of a group and run it."""
        drawer = Drawer(data.draw, self.eager.tensors, self.keeps_apart)
        form = drawer.form(self.groups[group])
        if form is None:
            return
        text = drawer.fill(form)
        mode = self._mode(drawer, group)
        line = self._do(mode + text, group, form.text)
        self.statistics.tried[form.text] += 1
        self.statistics.forms[form.text] += line.outcome.error is None or group in ("refused", "late")
        self.statistics.counts["in a mode"] += bool(mode)
        self._forget_some(drawer)

    def _mode(self, drawer: Drawer, group: str) -> str:
        """Draw the mode in which a line runs.

        In a session, a view of an inference tensor created outside of inference mode is an ordinary tensor.
        """
        if any(value.is_inference() for value in drawer.used):
            return _INFERENCE
        mode = "" if group in _PLAIN_GROUPS else drawer.pick(_MODES)
        # After a backward pass in inference mode, eager's gradients can be used nowhere else.
        return "" if group == "gradient" and mode == _INFERENCE else mode

    def _forget_some(self, drawer: Drawer) -> None:
        while len(drawer.values) >= _MOST_NAMES:
            name = drawer.pick(list(drawer.values)[:-1])
            self._do(f"del {name}", "drop")
            drawer.values = self.eager.tensors

    def _do(self, text: str, group: str, form: str = "") -> EagerLine:
        """Run a line on both sides and compare."""
        sizes = {name: value.size() for name, value in self.eager.tensors.items()} if "out=" in text else {}
        line = self.eager.run_first(text, group, self._new_name(form or text))
        resized = [name for name, size in sizes.items() if self.eager.space[name].size() != size]
        if line.outcome.error is None:
            self._forget_views(resized)
        self.history.append(str(line))
        self._mirror(line)
        if line.outcome.error is not None:
            # They were resized before the line was refused: their new elements are uninitialized.
            for name in resized:
                self._do(f"del {name}", "drop")
        return line

    def _forget_views(self, names: Sequence[str]) -> None:
        """Drop views of tensors that eager has resized, before the other side resizes them.

        Autograd recreates their gradient functions from the tensor's current state; see docs/compatibility.md.
        """
        bases = [self.eager.space[name] for name in names]
        for name, value in self.eager.tensors.items():
            if value.requires_grad and any(value._base is base for base in bases):
                self.history.append(f"del {name}")
                self.eager.run(self.history[-1])
                self.remote.run(self.history[-1])

    def _mirror(self, line: EagerLine) -> None:
        error = line.outcome.error
        self.statistics.counts[line.group] += 1
        self.statistics.counts["refused by eager"] += error is not None
        if self.pending and (error is not None or line.group in _NOT_REPEATABLE):
            self._settle()
        outcome = self.remote.run(line.text)
        if outcome.error is not None and error is None and outcome.error in self.pending:
            self.statistics.counts["told at a wait"] += 1
            self._settle()
            outcome = self.remote.run(line.text)
        if line.group == "late" and error is not None and outcome.error is None:
            self.pending.append(error)
            # The values that should have been written are unchanged, and failed decompositions show only when they are
            # checked.
            is_lost = ".data." not in line.text and ".linalg." not in line.text
            self.held += outcome.tensors if is_lost else ()
            self.statistics.counts["failed late"] += 1
        else:
            difference = self.remote.take(line, outcome)
            if difference:
                violated("a line", got=difference, wanted="what eager does", where=self._where())
        self._remember(line)
        self._count_versions(line.names, line.known)
        compare_metadata(self.eager, self.remote, self._where, self.offsets)

    def _count_versions(self, names: Sequence[str], known: Sequence[bool]) -> None:
        """Record the initial version counters of tensors: by how much a write increments them is up to the kernel."""
        for name, is_known in zip(names, known, strict=True):
            if name and not is_known:
                self.offsets[name] = version_offset(self.remote.space[name], self.eager.space[name])

    def _remember(self, line: EagerLine) -> None:
        if line.group == "write" and line.outcome.error is None and all(line.known) and not self.pending:
            self.again = [*self.again[-3:], line]
        elif line.group in ("drop", "metadata"):
            self.again = []

    def _settle(self) -> None:
        if self.pending:
            settle(self.pending, self.held, self._where)
            self.pending, self.held = [], []

    @rule(data=st.data())
    def create(self, data: Any) -> None:
        """Make a tensor."""
        self._draw(data, "create")

    @rule(data=st.data())
    def view(self, data: Any) -> None:
        """Create a view."""
        self._draw(data, "view")

    @rule(data=st.data())
    def view_again(self, data: Any) -> None:
        """Create a view: a second rule makes views frequent."""
        self._draw(data, "view")

    @rule(data=st.data())
    def write(self, data: Any) -> None:
        """Write to a tensor."""
        self._draw(data, "write")

    @rule(data=st.data())
    def write_again(self, data: Any) -> None:
        """Write to a tensor: a second rule makes writes frequent."""
        self._draw(data, "write")

    @rule(data=st.data())
    def metadata(self, data: Any) -> None:
        """Change a tensor's metadata."""
        self._draw(data, "metadata")

    @rule(data=st.data())
    def compute(self, data: Any) -> None:
        """Compute a tensor."""
        self._draw(data, "compute")

    @rule(data=st.data())
    def out(self, data: Any) -> None:
        """Compute into a tensor."""
        self._draw(data, "out")

    @rule(data=st.data())
    def random(self, data: Any) -> None:
        """Draw random numbers."""
        self._draw(data, "random")

    @rule(data=st.data())
    def random_state(self, data: Any) -> None:
        """Read or set the random state."""
        self._draw(data, "random_state")

    @rule(data=st.data())
    def mixed(self, data: Any) -> None:
        """Combine ordinary tensors and remote ones, or convert between them."""
        self._draw(data, "mixed")

    @rule(data=st.data())
    def read(self, data: Any) -> None:
        """Request a value."""
        self._draw(data, "read")

    @rule(data=st.data())
    def sliced(self, data: Any) -> None:
        """Request a value while operations on the same memory are pending."""
        self._draw(data, "sliced")

    @rule(data=st.data())
    def data_dependent(self, data: Any) -> None:
        """Compute a tensor whose size depends on data."""
        self._draw(data, "data_dependent")

    @rule(data=st.data())
    def gradient(self, data: Any) -> None:
        """Run a backward pass, or read its results."""
        self._draw(data, "gradient")

    @rule(data=st.data())
    def refused(self, data: Any) -> None:
        """Run a line that eager refuses."""
        self._draw(data, "refused")

    @rule(data=st.data())
    def late(self, data: Any) -> None:
        """Run a line that fails on execution; results that depend on it must fail too, and nothing else."""
        self._draw(data, "late")
        if self.held and self.pending and self.held[-1].dtype.is_floating_point and data.draw(st.booleans()):
            self.held.append(self.held[-1] * 2)

    @precondition(lambda self: len(self.eager.tensors) > 1)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        """Delete names."""
        drawer = Drawer(data.draw, self.eager.tensors)
        self._do(f"del {drawer.pick(list(drawer.values))}", "drop")

    @rule(what=st.sampled_from(("flush()", "synchronize()", "values()")))
    def wait(self, what: str) -> None:
        """Submit, or wait."""
        self._do(what, "wait")

    @rule()
    def compare(self) -> None:
        """Compare all values now."""
        self._settle()
        self.statistics.counts["compared"] += 1
        compare_values(self.eager, self.remote, None, self._where)

    @precondition(lambda self: self.again)
    @rule(times=st.integers(1, 3), waits=st.booleans())
    def repeat(self, times: int, waits: bool) -> None:
        """Repeat the latest writes, so that known and compiled programs occur."""
        lines = self.again
        for _ in range(times):
            for line in lines:
                self._do(line.text, "repeat")
            self._do("synchronize()" if waits else "flush()", "wait")

    @rule(data=st.data(), count=st.integers(2, 4))
    def threads(self, data: Any, count: int) -> None:
        """Run independent programs at once, then read everything from several threads."""
        self._settle()
        programs = [self._program(data, 1 + index) for index in range(count)]
        faults: list[str] = []
        self.history.append(f"# {count} threads run the lines above; then all of them read everything")
        workers = [(remote_twin(self.session.device), program) for _, program in programs]
        _at_once([partial(_run_all, twin, program, faults) for twin, program in workers])
        for fault in faults:
            violated("a line in a thread", got=fault, wanted="what eager does", where=self._where())
        for (eager, _), (remote, _) in zip(programs, workers, strict=True):
            offsets = {name: version_offset(remote.tensors[name], value) for name, value in eager.tensors.items()}
            compare_metadata(eager, remote, self._where, offsets)
            self.offsets |= offsets
            self.eager.adopt(eager)
            self.remote.adopt(remote)
        self._read_at_once(count)
        self.statistics.counts["threads"] += count
        self._forget_some(Drawer(data.draw, self.eager.tensors))

    def _program(self, data: Any, index: int) -> tuple[Twin, list[EagerLine]]:
        twin = eager_twin()
        first = f"filled((3, 3), torch.float32, {index}).to(device, copy=True)"
        lines = [twin.run_first(first, "create", self._new_name(first))]
        for group in data.draw(st.lists(st.sampled_from(_GROUPS_OF_WORKERS), min_size=1, max_size=5)):
            drawer = Drawer(data.draw, twin.tensors, self.keeps_apart)
            form = drawer.form(self.groups[group])
            if form is not None:
                lines.append(twin.run_first(drawer.fill(form), group, self._new_name(form.text)))
                self.statistics.counts[f"{group} in a thread"] += 1
        self.history += [f"#{index}# {line}" for line in lines]
        return twin, lines

    def _read_at_once(self, count: int) -> None:
        wanted = payload(self.remote)[1]
        fetched: list[list[torch.Tensor]] = []
        _at_once([lambda: fetched.append(brought_home(wanted))] * count)
        expect_equal(len(fetched), count, "threads that could read", self._where())
        for got in fetched:
            compare_values(self.eager, self.remote, got, self._where)

    def teardown(self) -> None:
        """Compare everything, delete everything, and check that nothing is left."""
        try:
            note("\n".join(self.history))
            if isinstance(sys.exc_info()[1], AssertionError):
                self.statistics.different += 1
            elif self.names and sys.exc_info()[0] is None:
                self._finish()
        except AssertionError:
            self.statistics.different += 1
            raise
        finally:
            self.eager.space.clear()
            self.remote.space.clear()
            self.pending, self.held, self.again = [], [], []
            self.flushing.__exit__(None, None, None)

    def _finish(self) -> None:
        self._settle()
        compare_values(self.eager, self.remote, None, self._where)
        immortal = self.eager.immortal()
        expect_equal(self.remote.immortal(), immortal, "tensors that outlive their names", self._where())
        djinn.synchronize()
        if self._wanted_handles() != self.handles:
            gc.collect()
            djinn.synchronize()
        left = self._wanted_handles() - self.handles
        if immortal:
            self.statistics.counts["refers to itself"] += 1
        else:
            # Fewer than at the beginning is fine: garbage of an earlier program may have been collected since.
            expect(left <= 0, "handles that are left", got=left, wanted="none", where=self._where())
        self.statistics.programs += 1


def _run_all(twin: Twin, lines: list[EagerLine], faults: list[str]) -> None:
    for line in lines:
        difference = twin.run_again(line)
        if difference:
            faults.append(f"{line}: {difference}")
            return


def _at_once(actions: list[Callable[[], Any]]) -> None:
    """Run actions on separate threads, and raise an exception of one of them."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], Any]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # raised again below, where it can be seen
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
