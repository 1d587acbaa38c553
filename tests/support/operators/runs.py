"""Makes changed calls of operators, as a server's worker would, in processes whose memory is guarded.

``python -m support.operators.runs JOB`` reads a job as JSON, and writes what came of it where that says. It is started
with guarded_memory.c preloaded; see `support.operators.fuzzer`. What it forks makes the calls, so a crash costs a fork.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import pickle
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from support.network.frame_feeder import limit_memory
from support.operators.corpus import Corpus, Example, pickled, record
from support.operators.layouts import example_text
from support.operators.ledger import MetricsStore
from support.operators.maker import CRASHED, HUNG, MOST_CPU_S, RAN, Maker, calls_of
from support.operators.memory import GuardedMemory, described, kernel_of
from support.operators.mutations import Plan, carried_out, is_flat, planned
from support.operators.planted import forget, plant
from support.operators.sequences import text_of
from support.operators.synthesis import proposals, slots

MEMORY_BYTES = 2**30
"""What a process may allocate beside what is guarded."""
MOST_SHOWN = 3
"""Findings of one overload and kernel that are looked at closely; others are counted."""
FEW = 4
"""An overload of which fewer calls were recorded gets some that are made up."""
MADE_UP = 8
"""Calls that are made up for an overload, if so many run."""
STOPPED = 87
"""Exit status of a process that was stopped because a call took too long."""
RELIEVED = 71
"""Exit status of a process that has made its share of calls."""
CALLS_OF_A_PROCESS = 4000


@attrs.frozen
class Job:
    """What to do.

    Attributes:
        overloads: Which are called.
        target: How many calls of each shall run.
        attempts: How many are tried at most.
        seconds: How long one overload may take, at most.
        dtypes, samples, families: How much is recorded; see `support.operators.corpus.record`.
        proposals: How many calls are made up for an overload that nothing was recorded of.
        seed: Of all that is left to chance.
        crashes: After so many, an overload is left alone.
        planted: Kinds of holes for which kernels are stood in; see `support.operators.planted`.
        behind: What is different of this when the same is done again behind a guard that has forgotten the rules that
            are about those.
        corpus: Where calls are kept between jobs.
        result: Where to write what came of it.
    """

    overloads: Sequence[str]
    target: int
    attempts: int
    seconds: float
    dtypes: int
    samples: int
    families: int
    proposals: int
    seed: int
    crashes: int
    planted: Sequence[str]
    behind: Mapping[str, Any]
    corpus: str
    result: str


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
        self._corpus = self._recorded()
        recorded_s = time.monotonic() - began
        self._memory.open()
        self._maker = Maker(self._memory, self._corpus)
        plant(job.planted)
        gc.collect()
        gc.freeze()
        self._find_calls()
        gc.freeze()
        found_s = time.monotonic() - began - recorded_s
        found = {**self._called(), "recorded_s": recorded_s, "found_s": found_s}
        if job.planted:
            forget(job.planted)
            self._job, self._findings, self._alike = attrs.evolve(job, **job.behind), [], {}
            found["behind"] = self._called()
        return found

    def _called(self) -> dict[str, Any]:
        """Make all calls, and say what came of them."""
        names, began = self._job.overloads, time.monotonic()
        ledger = MetricsStore(len(names))
        while (status := self._forked(lambda: self._make_calls(ledger))) != 0:
            if status != RELIEVED:
                self._note_end(ledger, status)
        return {
            "overloads": {name: {**ledger.counts(index), "tried": ledger.tried(index), "said": self._said.get(name, "")}
                          for index, name in enumerate(names)},
            "findings": self._findings, "seconds": time.monotonic() - began,
        }

    def _recorded(self) -> Corpus:
        """Read what another job has recorded, or record it, in a process that takes its threads with it."""
        kept = Path(self._job.corpus)
        if not kept.exists():
            child = os.fork()
            if not child:
                fresh = kept.with_suffix(f".{os.getpid()}")
                fresh.write_bytes(pickled(record(dtypes=self._job.dtypes, samples=self._job.samples,
                                                 families=self._job.families)))
                fresh.rename(kept)
                os._exit(0)
            os.waitpid(child, 0)
        corpus: Corpus = pickle.loads(kept.read_bytes())
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

    # Calls for overloads that little was recorded of.

    def _find_calls(self) -> None:
        """Make calls up, each in a process that may crash, and keep those that run, for other jobs as well."""
        kept = Path(self._job.corpus)
        kept = kept.with_name(f"{kept.name}.made-up-{self._job.proposals}")
        self._take_over(kept)
        lacking = [name for name in self._job.overloads if name not in self._said and (
            len(self._corpus.examples(name)) < FEW or is_flat(name, self._corpus))]
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
                        self._corpus.calls.setdefault(name, {}).update(
                            {("made up", index): known for index, known in enumerate(made.get(name, ()))})

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
            if is_called and crashes[position] < self._job.crashes:
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

    def _make_calls(self, ledger: MetricsStore) -> None:
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

    def _note_end(self, ledger: MetricsStore, status: int) -> None:
        index = ledger.current
        name = self._job.overloads[index]
        if status == 70:
            raise RuntimeError(f"the fuzzer itself failed at {name} {ledger.tried(index) - 1}")
        fault = self._memory.fault()
        number = ledger.tried(index) - 1
        plan = planned(name, number, self._corpus, self._job.seed)
        ledger.note(index, HUNG if status == STOPPED else CRASHED, ())
        if ledger.failed(index) >= self._job.crashes:
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
        for fewer in ("guards_all", "lifted", "scale", "sequence"):
            smaller = attrs.evolve(plan, **{fewer: False if fewer == "guards_all" else None})
            if getattr(plan, fewer) not in (None, False) and self._crashes(smaller):
                plan = smaller
        for mutation in plan.mutations:
            smaller = attrs.evolve(plan, mutations=tuple(other for other in plan.mutations if other is not mutation))
            if self._crashes(smaller):
                plan = smaller
        return plan, True

    def _text(self, plan: Plan) -> str:
        try:
            return text_of(calls_of(plan, carried_out(plan, self._corpus), self._corpus), example_text)
        except Exception as error:
            return f"? {error}"


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
