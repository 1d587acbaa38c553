"""Makes changed calls of operators, as a server's worker would, in processes whose memory is guarded.

``python operator_runs.py JOB`` reads a job as JSON, and writes what came of it where that says. It is started with
guarded_memory.c preloaded; see `operator_fuzzing`. What it forks makes the calls, so a crash costs a fork.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from djinn_conformance.programs import Call, Recording, Ref, assemble
from djinn_executor_torch.executor import TorchExecutor
from djinn_guard_core import kernels, layouts
from djinn_guard_core.guard import CoreGuard
from djinn_shapes_meta.shapes import MetaShapes
from fuzz_feeding import limit_memory
from operator_corpus import Corpus, Example, duplicate, mapped, pickled, record
from operator_mutations import KINDS, Plan, carried_out, changed, example_text, planned
from operator_synthesis import example_of, proposals, slots

from djinn.errors import DjinnError
from djinn.kinds.guard import Bounds, Watch
from djinn.model.schema import ReturnKind, facts_of, operator_named
from djinn.model.spec import tensors_in
from djinn.protocol.failures import is_out_of_memory
from djinn.protocol.messages import Poisoned

BOUNDS = (Bounds(program_bytes=2**26), Bounds())
"""Servers with and without a limit for the memory of a run. The one without lets more through, and costs less."""
BOUNDED_SHARE = 6
"""One call of so many is made on a server with a limit."""
MEMORY_BYTES = 2**30
"""What a process may allocate beside what is guarded."""
MOST_CPU_S = 3.0
"""What one call may take of a processor."""
MOST_SHOWN = 3
"""Findings of one overload and kernel that are looked at closely; others are counted."""
MADE_UP = 8
"""Calls that are made up for an overload, if so many run."""
MOST_CRASHES = 60
"""After so many, an overload is left alone."""
RAN, REFUSED, RAISED, CRASHED, HUNG, TOO_LARGE = range(6)
OUTCOMES = ("ran", "refused", "raised", "crashed", "hung", "too large")
STOPPED = 87
"""Exit status of a process that was stopped because a call took too long."""
BEYOND_STORAGE = -3
RELIEVED = 71
"""Exit status of a process that has made its share of calls."""
CALLS_OF_A_PROCESS = 4000
_NAME, _FRAMES, _HEAD = 160, 48, 9


@attrs.frozen
class Job:
    """What to do.

    Attributes:
        overloads: Which are called.
        target: How many calls of each shall run.
        attempts: How many are tried at most.
        seconds: How long one overload may take, at most.
        dtypes, samples: How much is recorded; see `operator_corpus.record`.
        proposals: How many calls are made up for an overload that nothing was recorded of.
        seed: Of all that is left to chance.
        taken_out: Names of operators whose rules the guard is to forget.
        trusted: Names of operators that the guard is to hold for proven.
        unranged: Names of operators of whose indices it is to believe anything.
        corpus: Where calls are kept between jobs; empty for nowhere.
        result: Where to write what came of it.
    """

    overloads: Sequence[str]
    target: int
    attempts: int
    seconds: float
    dtypes: int
    samples: int
    proposals: int
    seed: int
    taken_out: Sequence[str]
    trusted: Sequence[str]
    unranged: Sequence[str]
    corpus: str
    result: str


class GuardedMemory:
    """What this process was started with; see guarded_memory.c."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.guarded_memory_limit.argtypes = [ctypes.c_double]
        size_bytes = self._library.guarded_memory_fault_bytes()
        self.shared = mmap.mmap(-1, size_bytes)
        self._buffer = (ctypes.c_char * size_bytes).from_buffer(self.shared)
        self._size_bytes = size_bytes

    def open(self) -> None:
        """Write faults of this process down from now on."""
        failed = self._library.guarded_memory_open(ctypes.byref(self._buffer), self._size_bytes)
        if failed:
            raise RuntimeError(f"memory cannot be guarded here: {failed}")
        self.arm = self._library.guarded_memory_arm
        self.limit = self._library.guarded_memory_limit
        self._library.guarded_memory_note.argtypes = [ctypes.c_int, ctypes.c_size_t]
        self.note = self._library.guarded_memory_note
        self.begin = self._library.guarded_memory_begin
        self.broken = self._library.guarded_memory_broken

    def clear(self) -> None:
        """Forget the last fault."""
        struct.pack_into("q", self.shared, 0, 0)

    def fault(self) -> dict[str, Any]:
        """Read the last fault."""
        words = struct.unpack_from(f"{_HEAD}q", self.shared, 0)
        names = [self.shared[at:at + _NAME].split(b"\0")[0].decode(errors="replace")
                 for at in range(_HEAD * 8, _HEAD * 8 + words[8] * _NAME, _NAME)]
        return {"signal": words[0], "code": words[1], "address": words[2], "is_write": bool(words[3]),
                "block_size": words[4], "before": words[5], "beyond": words[6], "was_freed": bool(words[7]),
                "frames": names}


def described(fault: Mapping[str, Any]) -> str:
    """Say in words what a fault is."""
    number, code, address = fault["signal"], fault["code"], fault["address"]
    if not number:
        return "ended without a signal"
    name = signal.Signals(number).name
    if code == BEYOND_STORAGE:
        return "leaves a tensor that reaches beyond its storage"
    if code == -2:
        return "write beside a block"
    if name == "SIGSEGV":
        verb = "write" if fault["is_write"] else "read"
        if fault["block_size"] >= 0:
            where = (f"{fault['beyond']} bytes beyond" if fault["beyond"] else
                     f"{fault['before']} bytes before" if fault["before"] else "inside")
            return f"{verb} {where} a block of {fault['block_size']}{', freed' if fault['was_freed'] else ''}"
        if code == 128:
            return "access that is not aligned, or to no address"
        return f"{verb} at no block" if address > 65536 else f"{verb} through a null pointer"
    return name


def kernel_of(fault: Mapping[str, Any]) -> str:
    """Name the function of PyTorch that a fault is nearest to."""
    named = [frame for frame in fault["frames"] if "guarded" not in frame and not frame.startswith(
        ("_ZN2at4_ops", "libc.so", "libtorch_python", "_PyObject", "_PyEval"))]
    return next((frame for frame in named if frame.startswith(("_Z", "mkl"))), named[0] if named
                else "?")


class Maker:
    """Makes calls by the way that a worker's calls go: guard, executor, kernel."""

    def __init__(self, memory: GuardedMemory, corpus: Corpus) -> None:
        self._memory = memory
        self._corpus = corpus
        self._executor = TorchExecutor(torch.device("cpu"))
        self._random = self._executor.random_state(0)
        self._guard = CoreGuard()
        self._guard.prepare()
        self._watches = self._watching()
        self._seen = 0

    def _watching(self) -> list[Watch]:
        return [self._guard.watch(bounds, MetaShapes()) for bounds in BOUNDS]

    def make(self, plan: Plan) -> tuple[int, Sequence[str]]:
        """Make a planned call; say what came of it, and what was changed."""
        self._memory.begin()
        self._memory.arm(1, plan.place, plan.filling)
        try:
            values = carried_out(plan, self._corpus)
        except Exception:  # a change that cannot be made, for example of a dtype
            return RAISED, ()
        kinds = changed(plan, values)
        outcome, _ = self._make(plan.name, values, 3 if plan.guards_all else 1, plan.place, plan.filling, plan.number)
        return outcome, kinds

    def try_out(self, name: str, example: Example) -> tuple[int, str]:
        """Make a call as it is, and write to copies only."""
        self._memory.begin()
        self._memory.arm(1, 0, 0)
        values = {slot.name: value for slot, value in zip(slots(name), example.args, strict=False)} | example.kwargs
        return self._make(name, {key: mapped(item, duplicate) for key, item in values.items()}, 1, 0, 0, 0)

    def _make(self, name: str, values: Mapping[str, Any], guarded: int, place: int, filling: int, seed: int
              ) -> tuple[int, str]:
        self._seen += 1
        if self._seen % 500 == 0:
            # A session of many templates; a worker would have ended it by now.
            self._watches = self._watching()
        watch = self._watches[bool(seed % BOUNDED_SHARE)]
        operator = operator_named(name)
        inputs: list[Any] = []

        def take(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                inputs.append(item)
                return Ref(-len(inputs))
            return [take(member) for member in item] if isinstance(item, (list, tuple)) else item

        example = example_of(name, values)
        call = Call(operator, tuple(map(take, example.args)), {k: take(v) for k, v in example.kwargs.items()},
                    _results(operator, values))
        self._memory.arm(0, place, filling)
        failures: list[BaseException] = []
        asked: list[BaseException] = []
        try:
            piece = assemble(Recording(tuple(inputs), (call,)), 0, 1, range(call.results))
            checked = watch.check(piece.program)
            program = self._executor.compile_checked(piece.program, {
                index: _noting(check, asked) for index, check in checked.calls.items()})
            given = [inputs[-1 - index] for index in piece.inputs]
            refused = checked.refused(given, list(piece.numbers))
        except (DjinnError, TypeError, OverflowError, RuntimeError, ValueError) as error:
            return REFUSED, f"{type(error).__name__}: {error}"
        if refused:
            return TOO_LARGE, str(next(iter(refused.values())))

        def report(position: int, error: BaseException) -> Poisoned:
            failures.append(error)
            return Poisoned(0)

        self._random.seed(seed)
        self._memory.limit(MOST_CPU_S)
        self._memory.arm(guarded, place, filling)
        kept = program.run_without(given, list(piece.numbers), self._random, report, refused)
        self._memory.arm(0, place, filling)
        self._memory.limit(0.0)
        self._look_at([*given, *kept])
        if self._memory.broken():
            os._exit(86)
        if asked:
            return REFUSED, f"{type(asked[0]).__name__}: {asked[0]}"
        if not failures or "results, " in str(failures[0]):
            return RAN, ""
        if isinstance(failures[0], RuntimeError) and is_out_of_memory(failures[0]):
            return TOO_LARGE, str(failures[0])
        return RAISED, f"{type(failures[0]).__name__}: {failures[0]}"


    def _look_at(self, values: Sequence[Any]) -> None:
        """End the process if a tensor reaches beyond its storage: whoever reads it next would."""
        for tensor in tensors_in(values):
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
            beyond = (tensor.storage_offset() + last + 1) * tensor.element_size()
            storage = tensor.untyped_storage()
            if tensor.storage_offset() < 0 or beyond > storage.nbytes():
                self._memory.note(BEYOND_STORAGE, storage.data_ptr())
                os._exit(86)


def _noting(check: Callable[..., Any], asked: list[BaseException]) -> Callable[..., Any]:
    """Tell the guard's refusals from the kernel's."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(*args, **kwargs)
        except BaseException as error:
            asked.append(error)
            raise

    return ask


def _results(operator: torch._ops.OpOverload, values: Mapping[str, Any]) -> int:
    """Say how many results a call is announced to have; where that depends on it, as many as it has lists' members."""
    kinds = facts_of(operator).returns
    fixed = sum(kind in (ReturnKind.TENSOR, ReturnKind.PLAIN) for kind in kinds)
    if ReturnKind.LIST not in kinds:
        return fixed
    return fixed + max((len(value) for value in values.values() if isinstance(value, list) and any(
        isinstance(item, torch.Tensor) for item in value)), default=1)


class Ledger:
    """Counts that outlive the processes that make calls.

    For each overload: its next number, outcomes, and what was changed in calls that ran.
    """

    WIDTH = 1 + len(OUTCOMES) + len(KINDS)

    def __init__(self, overloads: int) -> None:
        self._map = mmap.mmap(-1, 8 * (2 + overloads * self.WIDTH))
        self._words = memoryview(self._map).cast("q")

    @property
    def current(self) -> int:
        """The overload that is being called."""
        return self._words[0]

    @current.setter
    def current(self, index: int) -> None:
        self._words[0] = index

    def next(self, overload: int) -> int:
        """Take the next number of an overload's calls."""
        at = 2 + overload * self.WIDTH
        self._words[at] += 1
        return self._words[at] - 1

    def tried(self, overload: int) -> int:
        """How many calls were tried."""
        return self._words[2 + overload * self.WIDTH]

    def note(self, overload: int, outcome: int, kinds: Sequence[str]) -> None:
        """Count a call."""
        at = 3 + overload * self.WIDTH
        self._words[at + outcome] += 1
        if outcome == RAN:
            for kind in kinds:
                self._words[at + len(OUTCOMES) + KINDS.index(kind)] += 1

    def ran(self, overload: int) -> int:
        """How many calls ran."""
        return self._words[3 + overload * self.WIDTH]

    def failed(self, overload: int) -> int:
        """How many calls ended their process."""
        at = 3 + overload * self.WIDTH
        return self._words[at + CRASHED] + self._words[at + HUNG]

    def counts(self, overload: int) -> dict[str, Any]:
        """What came of an overload's calls."""
        at = 3 + overload * self.WIDTH
        words = list(self._words[at:at + self.WIDTH - 1])
        return {"outcomes": dict(zip(OUTCOMES, words, strict=False)),
                "ran_with": {kind: count for kind, count in zip(KINDS, words[len(OUTCOMES):], strict=True) if count}}


class Runner:
    """Does a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._memory = GuardedMemory()
        self._findings: list[dict[str, Any]] = []
        self._corpus = Corpus()
        self._said: dict[str, str] = {}
        self._alike: dict[tuple[str, str, str], int] = {}

    def run(self) -> dict[str, Any]:
        """Record, make calls, and say what came of it."""
        job, began = self._job, time.monotonic()
        plant(job.taken_out, job.trusted, job.unranged)
        self._corpus = self._recorded()
        recorded_s = time.monotonic() - began
        self._memory.open()
        self._maker = Maker(self._memory, self._corpus)
        gc.collect()
        gc.freeze()
        self._find_calls()
        gc.freeze()
        found_s = time.monotonic() - began - recorded_s
        ledger = Ledger(len(job.overloads))
        while (status := self._forked(lambda: self._make_calls(ledger))) != 0:
            if status != RELIEVED:
                self._note_end(ledger, status)
        return {
            "overloads": {name: {**ledger.counts(index), "tried": ledger.tried(index), "said": self._said.get(name, "")}
                          for index, name in enumerate(job.overloads)},
            "findings": self._findings, "recorded_s": recorded_s, "found_s": found_s,
            "seconds": time.monotonic() - began - recorded_s - found_s,
        }

    def _recorded(self) -> Corpus:
        kept = Path(self._job.corpus) if self._job.corpus else None
        if kept is not None and kept.exists():
            return pickle.loads(kept.read_bytes())
        corpus = record(dtypes=self._job.dtypes, samples=self._job.samples)
        if kept is not None:
            fresh = kept.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(pickled(corpus))
            fresh.rename(kept)
        return corpus

    def _forked(self, action: Callable[[], None]) -> int:
        """Do something in a process of its own; return how it ended, 0 if all is well."""
        self._memory.clear()
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        status = 70
        try:
            self._memory.open()
            limit_memory(os.getpid(), MEMORY_BYTES)
            action()
            status = 0
        except BaseException as error:
            self._memory.arm(0, 0, 0)
            import traceback

            traceback.print_exception(error)
        finally:
            sys.stderr.flush()
            os._exit(status)

    # Calls for overloads that nothing was recorded of.

    def _find_calls(self) -> None:
        """Make calls up, each in a process that may crash, and keep those that run, for other jobs as well."""
        kept = Path(self._job.corpus or self._job.result)
        kept = kept.with_name(f"{kept.name}.made-up-{self._job.proposals}")
        self._take_over(kept)
        lacking = [name for name in self._job.overloads if name not in self._said and not self._corpus.examples(name)]
        mine = kept.with_name(f"{kept.name}.{os.getpid()}")
        if lacking:
            self._think_of(lacking, mine)
            self._take_over(kept)

    def _take_over(self, kept: Path) -> None:
        """Read what was made up; of what another job is at, only what is complete."""
        for path in sorted(kept.parent.glob(f"{kept.name}.*")):
            made: dict[str, list[Example]] = {}
            with path.open("rb") as file:
                while True:
                    try:
                        name, example, said = pickle.load(file)
                    except (EOFError, pickle.UnpicklingError):
                        break
                    if example is not None:
                        made.setdefault(name, []).append(example)
                    elif name not in self._said:
                        self._said[name] = said
                        self._corpus.calls[name] = {("made up", index): known
                                                    for index, known in enumerate(made.get(name, ()))}

    def _think_of(self, lacking: Sequence[str], path: Path) -> None:
        progress = mmap.mmap(-1, 24)
        position = skip = 0
        crashes: dict[int, int] = {}
        while position < len(lacking):
            struct.pack_into("qqq", progress, 0, position, skip, 0)
            status = self._forked(lambda: self._propose(lacking, position, skip, progress, path))  # noqa: B023  # at once
            position, skip, is_called = struct.unpack_from("qqq", progress, 0)
            if status == 0:
                break
            crashes[position] = crashes.get(position, 0) + 1
            if is_called:
                self._note_proposal(lacking[position], skip, status)
            if is_called and crashes[position] < MOST_CRASHES:
                skip += 1
            else:
                # Thinking of calls takes calls, too, and the next attempt would end in the same way.
                with path.open("ab") as file:
                    file.write(pickled((lacking[position], None, "its calls end the process")))
                position, skip = position + 1, 0

    def _proposed(self, name: str) -> Iterator[Example]:
        return proposals(name, self._corpus, 0, self._job.proposals)

    def _propose(self, names: Sequence[str], first: int, skip: int, progress: mmap.mmap, path: Path) -> None:
        with path.open("ab") as file:
            for position in range(first, len(names)):
                name, found, said = names[position], 0, ""
                struct.pack_into("qqq", progress, 0, position, 0, 0)
                for number, example in enumerate(self._proposed(name)):
                    if position == first and number < skip:
                        continue
                    struct.pack_into("qqq", progress, 0, position, number, 1)
                    outcome, text = self._maker.try_out(name, example)
                    struct.pack_into("qqq", progress, 0, position, number, 0)
                    if outcome == RAN:
                        found += 1
                        file.write(pickled((name, example, "")))
                        file.flush()
                        if found >= MADE_UP:
                            break
                    # The likeliest calls come first.
                    said = said or text
                file.write(pickled((name, None, "" if found else said)))
                file.flush()

    def _note_proposal(self, name: str, number: int, status: int) -> None:
        if status == 70:
            raise RuntimeError(f"the fuzzer itself failed at {name}")
        fault = self._memory.fault()
        same = (name, kernel_of(fault), "made up")
        self._alike[same] = self._alike.get(same, 0) + 1
        if status == STOPPED or self._alike[same] > MOST_SHOWN:
            return
        text = Path(self._job.result).with_suffix(".call")
        text.write_text("?")
        again = self._forked(lambda: self._try_again(name, number, text))
        self._tell({
            "overload": name, "number": -1 - number, "kind": described(fault), "kernel": kernel_of(fault),
            "call": text.read_text(), "changed": ["made up"], "again": again != 0, "frames": fault["frames"][:24]})
        text.unlink()

    def _try_again(self, name: str, number: int, text: Path) -> None:
        example = next(example for index, example in enumerate(self._proposed(name)) if index == number)
        values = {slot.name: value for slot, value in zip(slots(name), example.args, strict=False)} | dict(
            example.kwargs)
        text.write_text(example_text(values))
        self._maker.try_out(name, example)

    def _tell(self, finding: dict[str, Any]) -> None:
        """Keep a finding, and write it down at once."""
        self._findings.append(finding)
        with Path(self._job.result).with_suffix(".findings").open("a") as file:
            file.write(json.dumps(finding) + "\n")

    # Changed calls.

    def _make_calls(self, ledger: Ledger) -> None:
        job, made = self._job, 0
        for index in range(ledger.current, len(job.overloads)):
            ledger.current = index
            name = job.overloads[index]
            if not self._corpus.examples(name):
                continue
            until = time.monotonic() + job.seconds
            while ledger.ran(index) < job.target and ledger.tried(index) < job.attempts and time.monotonic() < until:
                plan = planned(name, ledger.next(index), self._corpus, job.seed)
                ledger.note(index, *self._maker.make(plan))
                made += 1
                if made >= CALLS_OF_A_PROCESS:
                    os._exit(RELIEVED)

    def _note_end(self, ledger: Ledger, status: int) -> None:
        index = ledger.current
        name = self._job.overloads[index]
        if status == 70:
            raise RuntimeError(f"the fuzzer itself failed at {name} {ledger.tried(index) - 1}")
        fault = self._memory.fault()
        number = ledger.tried(index) - 1
        plan = planned(name, number, self._corpus, self._job.seed)
        ledger.note(index, HUNG if status == STOPPED else CRASHED, ())
        if ledger.failed(index) >= MOST_CRASHES:
            ledger.current = index + 1
        same = (name, kernel_of(fault), described(fault).partition(" ")[0])
        self._alike[same] = self._alike.get(same, 0) + 1
        if self._alike[same] > MOST_SHOWN:
            return
        smaller, is_again = self._minimised(plan, fault) if status != STOPPED else (plan, True)
        self._tell({
            "overload": name, "number": number,
            "kind": f"more than {MOST_CPU_S:g} s" if status == STOPPED else described(fault),
            "kernel": kernel_of(fault), "call": self._text(smaller), "changed": list(smaller.kinds), "again": is_again,
            "frames": fault["frames"][:24]})

    def _crashes(self, plan: Plan) -> bool:
        return self._forked(lambda: self._make_once(plan)) not in (0, STOPPED)

    def _make_once(self, plan: Plan) -> None:
        self._maker.make(plan)

    def _minimised(self, plan: Plan, fault: Mapping[str, Any]) -> tuple[Plan, bool]:
        """Make the call again in a process of its own, then with fewer changes as long as it crashes."""
        if not self._crashes(plan):
            return plan, False
        for fewer in ("guards_all", "lifted", "scale"):
            smaller = attrs.evolve(plan, **{fewer: False if fewer == "guards_all" else None})
            if getattr(plan, fewer) and self._crashes(smaller):
                plan = smaller
        for mutation in plan.mutations:
            smaller = attrs.evolve(plan, mutations=tuple(other for other in plan.mutations if other is not mutation))
            if self._crashes(smaller):
                plan = smaller
        return plan, True

    def _text(self, plan: Plan) -> str:
        try:
            return example_text(carried_out(plan, self._corpus))
        except Exception as error:
            return f"? {error}"


def plant(taken_out: Sequence[str], trusted: Sequence[str], unranged: Sequence[str]) -> None:
    """Have the guard forget rules, or trust kernels or indices that it must not: holes that must be found."""
    rules: dict[str, Callable[[Mapping[str, Any]], None]] = kernels.RULES  # type: ignore[assignment]  # nobody else's
    for name in taken_out:
        del rules[name]
    for name in unranged:
        rules[name] = partial(_without_ranges, rules[name])
    proven = layouts._proven().union(trusted)
    layouts._proven = lambda: proven  # type: ignore[assignment]  # a cached function of no arguments


def _without_ranges(rule: Callable[[Mapping[str, Any]], None], named: Mapping[str, Any]) -> None:
    """Ask a rule, and have it believe that all elements are within their range."""
    within = kernels.within
    kernels.within = lambda *_, **__: None  # type: ignore[assignment]  # the same arguments
    try:
        rule(named)
    finally:
        kernels.within = within


def main() -> None:
    """Do the job of the command line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    found = Runner(job).run()
    fresh = Path(job.result).with_suffix(".fresh")
    fresh.write_text(json.dumps(found))
    fresh.rename(job.result)


if __name__ == "__main__":
    main()
