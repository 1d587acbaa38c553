"""Laws of executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from djinn.errors import ConfigurationError, SchemaMismatchError, UnknownOperatorError
from djinn.ir.program import Program
from djinn.wire.messages import Poisoned
from djinn.wire.tensors import DTYPES, is_dense
from djinn_conformance import assertions
from djinn_conformance.assertions import bytes_of, expect, expect_equal, expect_raises, expect_same_tensor
from djinn_conformance.capabilities import tolerance_of
from djinn_conformance.execution import compare, execute, known_values, prepare
from djinn_conformance.laws import law
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.oracle import run_contained, run_eager
from djinn_conformance.programs import Recording, Ref, RunnableProgram, call, pieces, refs_in, written_refs
from djinn_conformance.specs import law_named
from djinn_conformance.strategies import dense_tensors, filled, recordings
from djinn_conformance.subjects import Subject, torch_device
from djinn_plugins.common.kinds.executor import (
    CompiledProgram,
    Executor,
    ExecutorFactory,
    RandomState,
    Report,
    SupportsEffectReport,
    SupportsOffload,
    SupportsSpeculation,
    SupportsStop,
)

_ALIASING = VIEWS + IN_PLACE
_TOO_MANY_DIMENSIONS = torch.zeros((2,) * 9)
"""Broadcasts with no tensor of a random program, so that an in-place write from it always raises."""
_CUTS = st.lists(st.integers(1, 15), max_size=2, unique=True)
"""Positions at which a recording is cut into several programs."""
_EVERY = st.integers(1, 3)
"""Every how many results one is kept."""


def _cut(recording: Recording, cuts: list[int], every: int = 1) -> list[RunnableProgram]:
    """Cut a recording into programs and keep some of its results."""
    last = len(recording.calls)
    return pieces(recording, [cut for cut in cuts if cut < last], range(0, recording.results, every))


@law("executor.equals_eager")
@given(recording=recordings(grouped() + PLAIN), every=_EVERY)
def test_equals_eager(subject: Subject, executor: Executor, recording: Recording, every: int) -> None:
    """Keep all results, or some of them."""
    parts = _cut(recording, [], every)
    run = execute(executor, prepare(executor, parts), recording.inputs, executor.random_state(0))
    wanted = run_eager(recording, torch_device(subject))
    where = f"{subject}: {recording}"
    expect_equal(run.reports, [], "reported steps", where)
    tolerance = tolerance_of(law_named("executor.equals_eager"), subject)
    compare(executor, run, wanted, known_values(parts, recording), where, tolerance)


_ALIASES = Recording((filled((2, 3), torch.float32, 1), filled((3,), torch.float32, 2)), (
    call("aten::t", Ref(-1)),
    call("aten::select.int", Ref(-1), 0, 1),
    call("aten::add_.Tensor", Ref(1), Ref(-2), results=0),
    call("aten::mul.Tensor", Ref(0), Ref(0)),
    call("aten::transpose_", Ref(0), 0, 1, results=0),
    call("aten::zero_", Ref(-1), results=0),
    call("aten::add.Tensor", Ref(1), Ref(-2)),
    call("aten::copy_", Ref(1), Ref(3), results=0),
))
"""Writes through a base and through views of it, a view that is transposed in place, and reads in between."""


@law("executor.order_kept")
@given(recording=recordings(grouped("pointwise", "factories") + _ALIASING, favoured=_ALIASING, max_calls=20),
       cuts=_CUTS)
@example(recording=_ALIASES, cuts=[])
@example(recording=_ALIASES, cuts=[2, 5])
def test_order_kept(subject: Subject, executor: Executor, recording: Recording, cuts: list[int]) -> None:
    """Cut a program full of aliases into several, which pass aliases on to each other."""
    parts = _cut(recording, cuts)
    run = execute(executor, prepare(executor, parts), recording.inputs, executor.random_state(0))
    where = f"{subject}: {recording} cut before {cuts}"
    tolerance = tolerance_of(law_named("executor.equals_eager"), subject)
    wanted = run_eager(recording, torch_device(subject))
    compare(executor, run, wanted, known_values(parts, recording), where, tolerance)


_STATISTICS = Recording(tuple(filled(size, torch.float32, 1) for size in ((2, 3), (3,), (3,))), (
    call("aten::native_batch_norm", Ref(-1), None, None, Ref(-2), Ref(-3), True, 0.1, 1e-5, results=3),
))
"""A schema that does not mention all of its writes."""

_TAKEN_OVER = Recording(tuple(filled((2, 3), torch.float32, number) for number in (1, 2)), (
    call("aten::detach", Ref(-1)),
    call("aten::set_.source_Tensor", Ref(0), Ref(-2), results=0),
    call("aten::zero_", Ref(0), results=0),
))
"""A tensor that takes over another one's memory, and is then written."""


@law("executor.purity_true")
@given(recording=recordings(grouped() + PLAIN + IN_PLACE + RANDOM, max_calls=3))
@example(recording=_ALIASES)
@example(recording=_STATISTICS)
def test_purity_true(subject: Subject, executor: Executor, recording: Recording) -> None:
    """Run programs declared pure twice, and check everything that they might have changed."""
    (part, compiled), = prepare(executor, _cut(recording, []))
    if not isinstance(compiled, SupportsSpeculation) or not compiled.is_pure(list(part.numbers)):
        return
    where, random = f"{subject}: {recording}", executor.random_state(0)
    inputs = [executor.put(tensor) for tensor in recording.inputs]

    def run() -> list[Any]:
        given = [inputs[-1 - index] for index in part.inputs]
        outputs = compiled.run(given, list(part.numbers), random, lambda step, _: Poisoned(1 + step))
        return [bytes_of(executor.get(value)) if isinstance(value, torch.Tensor) else value for value in outputs]

    state = bytes_of(random.get())
    first = run()
    for index, (value, tensor) in enumerate(zip(inputs, recording.inputs, strict=True)):
        expect_same_tensor(executor.get(value), tensor, f"input i{index} after a pure run", where)
    expect_equal(bytes_of(random.get()), state, "random stream after a pure run", where)
    expect_equal(repr(run()), repr(first), "results of the second run", where)


@law("executor.effects_true")
@given(recording=recordings(grouped() + PLAIN + _ALIASING, max_calls=4))
@example(recording=_ALIASES)
@example(recording=_STATISTICS)
@example(recording=_TAKEN_OVER)
def test_effects_true(subject: Subject, executor: Executor, recording: Recording) -> None:
    """Run programs with declared effects, and check everything that they do not mention."""
    (part, compiled), = prepare(executor, _cut(recording, []))
    if not isinstance(compiled, SupportsEffectReport):
        return
    where, random, effects = f"{subject}: {recording}", executor.random_state(0), compiled.effects
    inputs = [executor.put(recording.inputs[-1 - index]) for index in part.inputs]
    storages = [(value.untyped_storage()._cdata, value.untyped_storage().nbytes()) for value in inputs]

    def run() -> list[Any]:
        outputs = compiled.run(list(inputs), list(part.numbers), random, lambda step, _: Poisoned(1 + step))
        return [bytes_of(executor.get(value)) if isinstance(value, torch.Tensor) else value for value in outputs]

    first = run()
    for position, (index, value) in enumerate(zip(part.inputs, inputs, strict=True)):
        if position not in effects.written:
            expect_same_tensor(executor.get(value), recording.inputs[-1 - index], f"unnamed input {position}", where)
        if not effects.changes_storages:
            storage = value.untyped_storage()
            expect_equal((storage._cdata, storage.nbytes()), storages[position], f"storage of input {position}", where)
    if effects.repeats:
        expect_equal(repr(run()), repr(first), "results of the second run", where)


_FAILS_HALFWAY = Recording((filled((3,), torch.float32, 1), _TOO_MANY_DIMENSIONS), (
    call("aten::neg", Ref(-1)),
    call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0),
    call("aten::mul_.Scalar", Ref(-1), 2.0, results=0),
    call("aten::exp", Ref(-1)),
))
"""A result, a step that raises, a write, and a result."""


@law("executor.stops_between_steps")
@given(recording=recordings(grouped() + PLAIN + IN_PLACE, max_calls=4))
@example(recording=_FAILS_HALFWAY)
def test_stops_between_steps(subject: Subject, executor: Executor, recording: Recording) -> None:
    """Run with a reason to stop from the start, and with one added when the first step has failed."""
    (part, compiled), = prepare(executor, _cut(recording, []))
    if not isinstance(compiled, SupportsStop):
        return
    where, random, reason = f"{subject}: {recording}", executor.random_state(0), RuntimeError("not wanted any more")

    def run(*stop: BaseException, stops_at_failure: bool = False) -> tuple[list[Any], list[Any], list[BaseException]]:
        inputs = [executor.put(recording.inputs[-1 - index]) for index in part.inputs]
        reasons, reported = list(stop), list[BaseException]()

        def report(step: int, error: BaseException) -> Poisoned:
            reported.append(error)
            if stops_at_failure and not reasons:
                reasons.append(reason)
            return Poisoned(len(reported))

        return inputs, compiled.run_until(reasons, list(inputs), list(part.numbers), random, report), reported

    for _ in range(2):
        inputs, outputs, reported = run(reason)
        expect_equal(reported, [reason] if recording.calls else [], "failures of a run that is not wanted", where)
        expect_equal(outputs, [Poisoned(1)] * len(outputs), "results of a run that is not wanted", where)
        for index, value in zip(part.inputs, inputs, strict=True):
            expect_same_tensor(executor.get(value), recording.inputs[-1 - index], f"input i{index}", where)
        if recording is not _FAILS_HALFWAY:
            run()
            continue
        inputs, outputs, reported = run(stops_at_failure=True)
        expect_equal(reported[1:], [reason], "failures after the first", where)
        expect_same_tensor(executor.get(outputs[0]), -recording.inputs[0], "what came before", where)
        expect_equal(outputs[1:], [Poisoned(2)], "what would have come after", where)
        expect_same_tensor(executor.get(inputs[part.inputs.index(-1)]), recording.inputs[0], "what was to be written",
                           where)
        run()


class _Interrupted:
    """A program whose inputs' memory is released and restored before it runs."""

    def __init__(self, executor: SupportsOffload, compiled: CompiledProgram, where: str) -> None:
        self._executor = executor
        self._compiled = compiled
        self._where = where

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        storages = {value.untyped_storage()._cdata: value.untyped_storage()
                    for value in inputs if isinstance(value, torch.Tensor)}
        for storage in storages.values():
            if self._executor.can_offload(storage):
                size_bytes, data = storage.nbytes(), self._executor.copy_out(storage)
                expect_equal(data.numel(), size_bytes, "bytes copied out", self._where)
                self._executor.offload(storage)
                expect_equal(storage.nbytes(), 0, "bytes of a offloaded storage", self._where)
                self._executor.restore(storage, data)
                expect_equal(storage.nbytes(), size_bytes, "bytes of a storage that was restored again", self._where)
        return self._compiled.run(inputs, numbers, random, report)


@law("executor.vacates_exactly")
@given(recording=recordings(_ALIASING + PLAIN), cuts=_CUTS)
@example(recording=_ALIASES, cuts=[2, 4])
def test_vacates_exactly(subject: Subject, executor: Executor, recording: Recording, cuts: list[int]) -> None:
    """Pass views, and values written through views, between programs, with their memory released in between."""
    if not isinstance(executor, SupportsOffload):
        return
    parts, where = _cut(recording, cuts), f"{subject}: {recording} cut before {cuts}"
    programs: list[Any] = [(part, _Interrupted(executor, compiled, where))
                           for part, compiled in prepare(executor, parts)]
    run = execute(executor, programs, recording.inputs, executor.random_state(0))
    wanted = run_eager(recording, torch_device(subject))
    compare(executor, run, wanted, known_values(parts, recording), where,
            tolerance_of(law_named("executor.equals_eager"), subject))


_CONSTANTS = Recording((filled((3,), torch.float32, 1),), (
    call("aten::zeros", [3], device=torch.device("cpu")),
    call("aten::mul.Scalar", Ref(-1), 0.5),
    call("aten::add_.Tensor", Ref(0), Ref(1), results=0),
))
"""A factory whose result is written, and a number: both tempt a compiler to cache too much."""


def _other_numbers(item: Any) -> Any:
    """Halve the real numbers of a call's arguments."""
    if isinstance(item, float):
        return item / 2
    if isinstance(item, (list, tuple)):
        return [_other_numbers(member) for member in item]
    return {name: _other_numbers(member) for name, member in item.items()} if isinstance(item, dict) else item


def _varied(recording: Recording, other: int) -> Recording:
    """Change the elements of inputs and the real numbers among arguments, but not the programs' structure."""
    inputs = tuple(filled(tensor.shape, tensor.dtype, other + index) for index, tensor in enumerate(recording.inputs))
    return Recording(inputs, tuple(
        attrs.evolve(made, args=tuple(_other_numbers(made.args)), kwargs=_other_numbers(dict(made.kwargs)))
        for made in recording.calls))


@law("executor.replay_stable")
@given(recording=recordings(grouped() + PLAIN), other=st.integers(0, 999), cuts=_CUTS, every=_EVERY)
@example(recording=_ALIASES, other=5, cuts=[3], every=1)
@example(recording=_CONSTANTS, other=5, cuts=[], every=1)
def test_replay_stable(
    subject: Subject, executor: Executor, recording: Recording, other: int, cuts: list[int], every: int
) -> None:
    """Run compiled programs again: on the same inputs and numbers, on others, and after a run on poison."""
    compiled, random = prepare(executor, _cut(recording, cuts, every)), executor.random_state(0)
    varied = _varied(recording, other)
    tolerance = tolerance_of(law_named("executor.equals_eager"), subject)
    for number, (variant, poisoned) in enumerate(
            [(recording, {}), (recording, {}), (varied, {}), (recording, {-1: 7}), (recording, {})], 1):
        parts = _cut(variant, cuts, every)
        programs = [(part, program) for part, (_, program) in zip(parts, compiled, strict=True)]
        run = execute(executor, programs, variant.inputs, random, poisoned)
        if poisoned:
            continue
        where = f"{subject}: run {number} of {variant} cut before {cuts}"
        wanted = run_contained(variant, torch_device(subject))
        compare(executor, run, wanted, known_values(parts, recording), where, tolerance)


@st.composite
def sabotaged(draw: st.DrawFn) -> Recording:
    """Draw a recording in which some calls raise, each with as many results as the call that it replaces."""
    recording = draw(recordings(grouped() + _ALIASING))
    bad = Ref(-1 - len(recording.inputs))
    calls = list(recording.calls)
    for position in draw(st.sets(st.integers(0, max(len(calls) - 1, 0)), min_size=1, max_size=3)):
        if position >= len(calls):
            continue
        made = calls[position]
        operands, written = refs_in([made.args, made.kwargs]), written_refs(made)
        if written and not made.results:
            calls[position] = call("aten::add_.Tensor", written[0], bad, results=0)
        elif operands and made.results == 1:
            calls[position] = call("aten::select.int", operands[0], 0, 1_000_000)
        elif operands and made.results == 2:
            calls[position] = call("aten::topk", operands[0], 1_000_000, results=2)
    assume(calls != list(recording.calls))
    return Recording((*recording.inputs, _TOO_MANY_DIMENSIONS), tuple(calls))


_FAILING = Recording((filled((2, 3), torch.float32, 1), _TOO_MANY_DIMENSIONS), (
    call("aten::neg", Ref(-1)),
    call("aten::add_.Tensor", Ref(0), Ref(-2), results=0),
    call("aten::select.int", Ref(0), 0, 1_000_000),
    call("aten::mul.Tensor", Ref(1), Ref(0)),
    call("aten::add_.Tensor", Ref(-1), Ref(0), results=0),
    call("aten::topk", Ref(-1), 1_000_000, results=2),
    call("aten::exp", Ref(0)),
))
"""Steps that raise with no, one and two results, a step that needs one of them, and steps that do not."""


@law("executor.failure_contained")
@given(recording=sabotaged(), cuts=_CUTS, every=_EVERY)
@example(recording=_FAILING, cuts=[], every=1)
def test_failure_contained(
    subject: Subject, executor: Executor, recording: Recording, cuts: list[int], every: int
) -> None:
    """Run programs in which steps raise, also repeatedly."""
    parts = _cut(recording, cuts, every)
    compiled, wanted = prepare(executor, parts), run_contained(recording, torch_device(subject))
    for number in (1, 2):
        run = execute(executor, compiled, recording.inputs, executor.random_state(0))
        where = f"{subject}: run {number} of {recording}"
        expect_equal([step for step, _ in run.reports], list(wanted.raised), "reported steps, in order", where)
        for step, error in run.reports:
            expect_equal(type(error).__name__, type(wanted.raised[step]).__name__, f"exception of step {step}", where)
        compare(executor, run, wanted, known_values(parts, recording), where)


@law("executor.poison_propagates")
@given(recording=recordings(grouped("pointwise", "shuffles") + VIEWS, favoured=_ALIASING, dtypes=(torch.float32,)),
       chosen=st.sets(st.integers(0, 4), min_size=1), cuts=_CUTS)
@example(recording=_ALIASES, chosen={1}, cuts=[])
@example(recording=_ALIASES, chosen={1}, cuts=[2])
def test_poison_propagates(
    subject: Subject, executor: Executor, recording: Recording, chosen: set[int], cuts: list[int]
) -> None:
    """Poison some inputs."""
    poisoned = {-1 - index: 10 + index for index in chosen if index < len(recording.inputs)}
    parts = _cut(recording, cuts)
    compiled, wanted = prepare(executor, parts), run_contained(recording, torch_device(subject), poisoned)
    for number in (1, 2):
        run = execute(executor, compiled, recording.inputs, executor.random_state(0), poisoned)
        where = f"{subject}: run {number} of {recording}, poisoned {poisoned}"
        expect_equal([step for step, _ in run.reports], list(wanted.raised), "reported steps", where)
        compare(executor, run, wanted, known_values(parts, recording), where)


@law("executor.randomness_private")
@given(recording=recordings(grouped("pointwise", "views") + RANDOM, favoured=RANDOM), seed=st.integers(0, 2**40),
       cuts=_CUTS)
def test_randomness_private(
    subject: Subject, executor: Executor, recording: Recording, seed: int, cuts: list[int]
) -> None:
    """Draw in several programs, with another session drawing in between, and continue from a saved state."""
    device = torch_device(subject)
    parts = _cut(recording, cuts)
    compiled, seen = prepare(executor, parts), known_values(parts, recording)
    mine, other = executor.random_state(seed), executor.random_state(seed + 1)
    before, wanted = _own_generators(device), run_eager(recording, device, seed)
    start = mine.get()
    runs = []
    for number in (1, 2, 3):
        if number == 2:
            mine.seed(seed)
        elif number == 3:
            mine.set(start)
        execute(executor, compiled, recording.inputs, other)
        runs.append(execute(executor, compiled, recording.inputs, mine))
    for number, run in enumerate(runs, 1):
        compare(executor, run, wanted, seen, f"{subject}: run {number} of {recording} with seed {seed}")
    expect(all(map(torch.equal, before, _own_generators(device))), "state of the process's own generators",
           got="another state", wanted="the state before the runs", where=f"{subject}: {recording}")


def _own_generators(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@law("executor.put_copies")
@given(tensor=dense_tensors(tuple(DTYPES.values())))
def test_put_copies(subject: Subject, executor: Executor, tensor: torch.Tensor) -> None:
    """Put tensors of every dtype that can be sent."""
    kept, where = bytes_of(tensor), f"{subject}: put of {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
    value = executor.put(tensor)
    expect_equal(torch.device(executor.device).type, value.device.type, "type of the device", where)
    assertions.expect_same_metadata(value, tensor, "the value", where)
    tensor.untyped_storage().fill_(1)  # type: ignore[attr-defined]  # defined at run time, for every storage
    expect_equal(bytes_of(executor.get(value)), kept, "bits of the value after the argument changed", where)


@law("executor.get_copies")
@given(recording=recordings(VIEWS, max_calls=4))
def test_get_copies(subject: Subject, executor: Executor, recording: Recording) -> None:
    """Fetch views: expanded, strided, conjugated, at an offset."""
    parts = _cut(recording, [])
    run = execute(executor, prepare(executor, parts), recording.inputs, executor.random_state(0))
    wanted = run_eager(recording, torch.device("cpu"))
    for index in known_values(parts, recording):
        value, should = run.values[index], wanted.values[index].resolve_conj().resolve_neg()
        got, where = executor.get(value), f"{subject}: get of r{index} of {recording}"
        expect_same_tensor(got, should, "the copy", where)
        expect(is_dense(tuple(got.size()), got.stride()), "stride of the copy", got=got.stride(), wanted="a dense one",
               where=where)
        if is_dense(tuple(should.size()), should.stride()):
            expect_equal(got.stride(), should.stride(), "stride of the copy", where)
        expect(got.device.type == "cpu" and not got.is_inference() and not got.requires_grad and not got.is_conj(),
               "the copy", got=got, wanted="an ordinary CPU tensor", where=where)
        again = executor.get(value)
        got.fill_(1)
        expect_same_tensor(executor.get(value), again, "the value after the copy was written", where)


@law("executor.plain_results", effort=0.2)
@given(number=st.sampled_from([3, 0.25, True, float("nan"), 1 + 2j]), seed=st.integers(0, 99))
def test_plain_results(subject: Subject, executor: Executor, number: Any, seed: int) -> None:
    """Return numbers, bools, absent tensors, and a plain value among tensors."""
    scalar, matrix = torch.tensor(number), filled((3, 3), torch.float32, seed)
    recording = Recording((scalar, matrix), (
        call("aten::_local_scalar_dense", Ref(-1)),
        call("aten::equal", Ref(-2), Ref(-2)),
        call("aten::native_layer_norm", Ref(-2), [3], None, None, 1e-5, results=3),
        call("aten::native_layer_norm_backward", Ref(-2), Ref(-2), [3], Ref(3), Ref(4), None, None,
             [True, False, False], results=3),
        call("aten::add.Tensor", Ref(5), Ref(-2)),
        call("aten::is_nonzero", Ref(-1)),
    ))
    parts = _cut(recording, [])
    compiled = prepare(executor, parts)
    for run_number in (1, 2):
        run = execute(executor, compiled, recording.inputs, executor.random_state(0))
        where = f"{subject}: run {run_number} of {recording} on {number!r}"
        expect_equal(run.reports, [], "reported steps", where)
        compare(executor, run, run_eager(recording, torch_device(subject)), known_values(parts, recording), where)


def _altered(change: dict[str, str]) -> Program:
    """Create a program of a harmless and an altered operator."""
    recording = Recording((torch.zeros(2),), (call("aten::neg", Ref(-1)), call("aten::add.Tensor", Ref(0), Ref(-1))))
    [piece] = pieces(recording, [], [1])
    harmless, altered = piece.program.templates
    fields = {"operator": altered.operator, "digest": altered.digest} | change
    other = type(altered)(fields["operator"], fields["digest"], altered.arguments, altered.keywords)
    return Program((harmless, other), piece.program.steps, piece.program.inputs, piece.program.keep)


@law("executor.unknown_operator_named")
@pytest.mark.parametrize("operator", ["aten::no_such_operator", "aten::add.no_such_overload", "nowhere::add.Tensor",
                                      "os::system", "aten::__class__", "aten::add.int", "", "add"])
def test_unknown_operator_named(subject: Subject, executor: Executor, operator: str) -> None:
    """Use names of operators that do not exist or are not allowed."""
    expect_raises(UnknownOperatorError, lambda: executor.compile(_altered({"operator": operator})),
                  f"compiling the operator {operator!r}", str(subject), naming=operator)


@law("executor.schema_mismatch_named")
@pytest.mark.parametrize("digest", ["0" * 16, ""])
def test_schema_mismatch_named(subject: Subject, executor: Executor, digest: str) -> None:
    """Use a digest from another release."""
    expect_raises(SchemaMismatchError, lambda: executor.compile(_altered({"digest": digest})),
                  "compiling an operator of another schema", str(subject), naming="aten::add.Tensor")


@law("executor.devices_real")
def test_devices_real(subject: Subject, plugin: ExecutorFactory) -> None:
    """Open every device once, and one that does not exist."""
    listed = plugin.devices()
    expect(len(set(listed)) == len(listed), "devices", got=listed, wanted="each once", where=str(subject))
    if not listed:
        expect_raises(ConfigurationError, lambda: plugin.open(""), "opening the best of no devices", str(subject))
    for device in listed:
        opened = plugin.open(device)
        expect_equal(opened.device, device, "device of the executor", str(subject))
        expect_same_tensor(opened.get(opened.put(torch.arange(3))), torch.arange(3), "a tensor put and got",
                           f"{subject} on {device}")
        opened.close()
    for absent in ("cuda:999", "no such device"):
        expect_raises(ConfigurationError, lambda device=absent: plugin.open(device),  # type: ignore[misc]  # binds the loop variable
                      f"opening {absent!r}", str(subject), naming=absent)
