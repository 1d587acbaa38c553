"""Laws of guards."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given

from djinn.errors import ProgramTooLargeError, ProtocolError, UnknownOperatorError
from djinn.ir.program import (
    ConstantArgument,
    ListArgument,
    NumberArgument,
    Program,
    Step,
    Template,
    TensorArgument,
    TorchArgument,
)
from djinn.ir.schema import facts_of
from djinn_conformance.assertions import bytes_of, expect, expect_equal, expect_raises
from djinn_conformance.laws import law
from djinn_conformance.operations import PLAIN, RANDOM, grouped
from djinn_conformance.oracle import copied, perform, run_eager
from djinn_conformance.programs import Recording, Ref, RunnableProgram, call, fill, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_conformance.subjects import Subject, default_plugins
from djinn_plugins.common.kinds.guard import Bounds, CheckedProgram, Guard, Prepared, ProgramChecker
from djinn_plugins.common.operators.operators import operator_named

CPU = torch.device("cpu")
_GIB = 2**30
_TENSOR, _NUMBER, _NOTHING = TensorArgument(), NumberArgument(), ConstantArgument(None)


def watch(plugin: Guard, **bounds: Any) -> ProgramChecker:
    """Create a guard's watch, with the shape inference that a server would use."""
    return plugin.watch(Bounds(**{"program_bytes": _GIB, **bounds}), default_plugins().choose("shapes", "meta"))


def one_call(name: str, *arguments: Any, results: int = 1, operands: int | None = None, **keywords: Any) -> Program:
    """Create a program of one call; its tensors are inputs."""
    operator = operator_named(name)
    count = sum(argument == _TENSOR for argument in arguments) if operands is None else operands
    template = Template(name, facts_of(operator).digest, arguments, tuple(keywords.items()))
    return Program((template,), (Step(0, tuple(range(-1, -count - 1, -1)), results),), count, tuple(range(results)))


_FILES = [
    one_call("aten::from_file", ConstantArgument("/etc/passwd")),
    one_call("aten::from_file.out", ConstantArgument("/etc/passwd"), out=_TENSOR, operands=1, results=0),
]
_POINTERS = [
    one_call("aten::set_.source_Storage", _TENSOR, _TENSOR, results=0),
    one_call("aten::set_.source_Storage_storage_offset", _TENSOR, _TENSOR, _NUMBER, _NUMBER, results=0),
    one_call("aten::record_stream", _TENSOR, _TENSOR, results=0),
    one_call("aten::fbgemm_pack_gemm_matrix_fp16", _TENSOR),
    one_call("quantized::linear_unpack", _TENSOR, results=2),
    one_call("prims::empty_strided", _NUMBER, _NUMBER, dtype=TorchArgument("dtype", "float32"),
             device=TorchArgument("device", ""), requires_grad=ConstantArgument(False)),
]


@law("guard.refuses_files")
@pytest.mark.parametrize("program", _FILES, ids=lambda program: program.templates[0].operator)
def test_refuses_files(subject: Subject, plugin: Guard, program: Program) -> None:
    """Check programs that are otherwise valid."""
    expect_raises(UnknownOperatorError, lambda: watch(plugin).check(program), "checking it", str(subject),
                  naming=program.templates[0].operator)


@law("guard.refuses_pointers")
@pytest.mark.parametrize("program", _POINTERS, ids=lambda program: program.templates[0].operator)
def test_refuses_pointers(subject: Subject, plugin: Guard, program: Program) -> None:
    """Check storages, streams, packed weights, and namespaces that are not allowed."""
    expect_raises(UnknownOperatorError, lambda: watch(plugin).check(program), "checking it", str(subject),
                  naming=program.templates[0].operator)


_MISFITS = {
    "too-many": one_call("aten::neg", _TENSOR, _TENSOR),
    "too-few": one_call("aten::add.Tensor", _TENSOR),
    "twice": one_call("aten::add.Tensor", _TENSOR, _TENSOR, other=_TENSOR, operands=3),
    "unknown": one_call("aten::neg", _TENSOR, nothing=_NUMBER),
    "by-position": one_call("aten::add.Tensor", _TENSOR, _TENSOR, _NUMBER),
    "text-for-tensor": one_call("aten::neg", ConstantArgument("x")),
    "nothing-for-tensor": one_call("aten::neg", _NOTHING),
    "tensor-for-text": one_call("aten::conv1d.padding", _TENSOR, _TENSOR, _NOTHING, _NUMBER, _TENSOR, operands=3),
    "list-for-tensor": one_call("aten::neg", ListArgument((_TENSOR,)), operands=1),
    "tensor-for-list": one_call("aten::cat", _TENSOR),
    "no-such-dtype": one_call("aten::sum", _TENSOR, dtype=TorchArgument("dtype", "__class__")),
    "dtype-for-device": one_call("aten::zeros", _NUMBER, device=TorchArgument("dtype", "float32")),
    "another-device": one_call("aten::zeros", _NUMBER, device=ConstantArgument("cuda:1")),
    "results-too-many": one_call("aten::neg", _TENSOR, results=2),
    "results-too-few": one_call("aten::max.dim", _TENSOR, _NUMBER, results=1),
    "results-beyond-counting": one_call("aten::neg", _TENSOR, results=0),
}


@law("guard.refuses_misfits")
@pytest.mark.parametrize("program", _MISFITS.values(), ids=list(_MISFITS))
def test_refuses_misfits(subject: Subject, plugin: Guard, program: Program) -> None:
    """Check every way in which a call can mismatch its schema."""
    expect_raises(ProtocolError, lambda: watch(plugin).check(program), "checking it", str(subject))


@attrs.frozen
class Lie:
    """One call that must not be made, as a recording."""

    recording: Recording

    def __repr__(self) -> str:
        return str(self.recording.calls[0].operator.name())


def _lie(inputs: list[torch.Tensor], name: str, *args: Any, **kwargs: Any) -> Lie:
    return Lie(Recording(tuple(inputs), (call(name, *args, **kwargs),)))


_FOUR = filled((4,), torch.float32, 1)
_IMAGE = filled((1, 3, 4, 4), torch.float32, 2)
_ONE = filled((1,), torch.float32, 3)
_QUERY, _TWO_KEYS = (filled((1, heads, 4, 8), torch.float32, heads) for heads in (4, 2))
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_ROW_PAIRS = filled((6, 2), torch.float32, 9)


def _sized(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor that has a size and no elements."""
    return torch.empty(size, dtype=dtype, device="meta")


_HEADS, _THREE, _TWO, _EIGHT = (_sized(1, heads, 4, 8) for heads in (4, 3, 2, 8))
_LIES = [
    _lie([_FOUR], "aten::as_strided", Ref(-1), [4], [1], 1),
    _lie([_FOUR], "aten::as_strided_", Ref(-1), [4], [2], 0, results=0),
    _lie([_FOUR], "aten::as_strided", Ref(-1), [5], [1], 0),
    _lie([_sized(4)], "aten::_reshape_alias", Ref(-1), [5], [1]),
    _lie([_sized(1, 3, 4, 4), _sized(1), _sized(1)], "aten::native_batch_norm", Ref(-1), Ref(-2), Ref(-3), Ref(-2),
         Ref(-3), True, 0.1, 1e-5, results=3),
    _lie([_sized(4), _sized(5)], "aten::_log_softmax_backward_data", Ref(-2), Ref(-1), 0, torch.float32),
    _lie([_sized(1, 3, 3, 3), _sized(1, 3, 4, 4), _sized(1, 3, 3, 3, dtype=torch.int64)],
         "aten::max_pool2d_with_indices_backward", Ref(-1), Ref(-2), [2, 2], [2, 2], [0, 0], [1, 1], False, Ref(-3)),
    _lie([torch.tensor([2, -1])], "aten::repeat_interleave.Tensor", Ref(-1)),
    _lie([_sized(3, 4, dtype=torch.complex64)], "aten::_fft_c2c", Ref(-1), [2], 0, True),
    _lie([_HEADS, _THREE], _ATTENTION, Ref(-1), Ref(-2), Ref(-2), results=2),
    _lie([_HEADS, _EIGHT], _ATTENTION, Ref(-1), Ref(-2), Ref(-2), results=2),
    _lie([_HEADS, _TWO], _ATTENTION, Ref(-1), Ref(-1), Ref(-2), results=2),
    _lie([_HEADS, _sized(2, 8, dtype=torch.bool)], "aten::_masked_softmax", Ref(-1), Ref(-2), 3, 1),
    _lie([_sized(4, 3), _sized(2, 3)], "aten::_compute_linear_combination", Ref(-1), Ref(-2)),
    _lie([_sized(1, 3, 4, 4, dtype=torch.uint8)], "aten::_upsample_nearest_exact2d", Ref(-1), [8, 8], 2.0**-28, 1.0),
    _lie([_sized(5, 6, 12, dtype=torch.complex64)], "aten::_fft_c2c", Ref(-1), [-2], 0, True),
    _lie([_sized(3, 2), _sized(3, dtype=torch.int64)], "aten::embedding_dense_backward", Ref(-1), Ref(-2), 4, 4, False),
    _lie([_sized(2, 3), _sized(3)], "aten::gelu_backward", Ref(-2), Ref(-1)),
    _lie([_ROW_PAIRS, torch.tensor([5, 2])], "aten::segment_reduce", Ref(-1), "max", lengths=Ref(-2)),
    _lie([_sized(5, 3), _sized(5, 0)], "aten::linalg_lstsq", Ref(-1), Ref(-2), driver="gelss", results=4),
]


@law("guard.refuses_lies")
@pytest.mark.parametrize("lie", _LIES, ids=[f"{number}-{lie!r}" for number, lie in enumerate(_LIES)])
def test_refuses_lies(subject: Subject, plugin: Guard, lie: Lie) -> None:
    """Ask about calls whose operands do not fit. None is made."""
    recording = lie.recording
    expect(_is_refused(plugin, recording), "the call", got="let through", wanted="refused",
           where=f"{subject}: {recording}")


_MANY = filled((256,), torch.float32, 4)
"""Its first element, expanded, is never longer than it is: what does not look at strides reads other elements of it."""
_OPTIMIZED: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False,
                              "maximize": False, "is_first_step": True}


def _stretched(name: str, *args: Any, results: int = 1, inputs: tuple[torch.Tensor, ...] = (_MANY,),
               size: tuple[int, ...] = (256,), **kwargs: Any) -> Recording:
    """Return a call that takes, as value 1, the first element of the first input, expanded to many elements."""
    return Recording(inputs, (
        call("aten::slice.Tensor", Ref(-1), 0, 0, 1),
        call("aten::expand", Ref(0), list(size)),
        call(name, *args, results=results, **kwargs),
    ))


def _numbered(recordings: list[Recording]) -> list[str]:
    return [f"{number}-{recording.calls[-1].operator.name()}" for number, recording in enumerate(recordings)]


_OVERLAPS = [
    _stretched("aten::rrelu_with_noise", Ref(-1), Ref(1), 0.125, 0.125, True),
    _stretched("aten::rrelu_with_noise_", Ref(-1), Ref(1), 0.125, 0.125, True, results=0),
    _stretched("aten::_fused_sgd_", [Ref(1)], [Ref(-1)], [], results=0, **_OPTIMIZED),
    _stretched("aten::_fused_sgd_", [Ref(-1)], [Ref(1)], [], results=0, **_OPTIMIZED),
    _stretched("aten::index_put_", Ref(1), [Ref(-2)], Ref(-1), results=0, inputs=(_MANY, torch.arange(256))),
    _stretched("aten::add_.Tensor", Ref(1), Ref(-1), results=0),
    _stretched("aten::normal_", Ref(1), results=0),
    _stretched("aten::native_batch_norm", Ref(-2), None, None, Ref(1), Ref(-1), True, 0.1, 1e-5, results=3,
               inputs=(_MANY, filled((2, 256, 3), torch.float32, 5))),
    _stretched("aten::cumsum.out", Ref(-1), 0, out=Ref(1), results=0),
]


@law("guard.refuses_overlap")
@pytest.mark.parametrize("recording", _OVERLAPS, ids=_numbered(_OVERLAPS))
def test_refuses_overlap(subject: Subject, plugin: Guard, recording: Recording) -> None:
    """Check calls that write 256 elements to the memory of one."""
    asked = _asked_last(plugin, recording)
    expect(isinstance(asked, Exception), "the call", got="let through", wanted="refused",
           where=f"{subject}: {recording}")


_PLANES = filled((2, 256, 9), torch.float32, 6)
_FEW_PLANES = filled((2, 16, 8), torch.float32, 6)
_FEW = filled((16,), torch.float32, 9)
_GROUPS = filled((2, 4), torch.float32, 7).abs() + 1
_ROWS = filled((1, 1, 16, 8), torch.float32, 8)
_INSIDE = [
    _stretched("aten::native_group_norm", Ref(-2), Ref(1), None, 2, 256, 9, 16, 1e-5, results=3,
               inputs=(_MANY, _PLANES)),
    _stretched("aten::native_group_norm", Ref(-2), None, Ref(1), 2, 256, 9, 16, 1e-5, results=3,
               inputs=(_MANY, _PLANES)),
    _stretched("aten::native_group_norm_backward", Ref(1), Ref(-2), Ref(-3), Ref(-3), Ref(-4), 2, 16, 8, 4,
               [True, True, True], results=3, inputs=(_MANY, _FEW_PLANES, _GROUPS, _FEW), size=(2, 16, 8)),
    _stretched("aten::native_batch_norm_backward", Ref(-2), Ref(-2), Ref(-1), None, None, Ref(1), Ref(1), True, 1e-5,
               [True, True, True], results=3, inputs=(_MANY, _PLANES)),
    _stretched("aten::_weight_norm_interface", Ref(1), Ref(-2), 0, results=2, size=(16, 16),
               inputs=(_MANY, _ONE.expand(16, 1).clone())),
    _stretched("aten::median.dim", Ref(1), 1, results=2, size=(3, 80)),
    _stretched("aten::nanmedian.dim", Ref(1), 1, results=2, size=(3, 80)),
    _stretched(_ATTENTION, Ref(-2), Ref(1), Ref(-2), results=2, inputs=(_MANY, _ROWS), size=(1, 1, 16, 8)),
]


@law("guard.stays_inside")
@pytest.mark.parametrize("recording", _INSIDE, ids=_numbered(_INSIDE))
def test_stays_inside(subject: Subject, plugin: Guard, recording: Recording) -> None:
    """Check kernels that assume dense operands: next to the intended element lie others of its storage."""
    asked = _asked_last(plugin, recording)
    if isinstance(asked, Exception):
        return
    made = recording.calls[-1]
    dense = {index: value.contiguous() for index, value in _known_before(recording).items()}
    results = made.operator(*asked.args, **asked.kwargs)
    wanted = perform(made, dense, CPU)
    for index, (mine, theirs) in enumerate(zip(results, wanted, strict=True)):
        expect(bool(torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs))), f"result {index}", got=mine,
               wanted=theirs, where=f"{subject}: {recording}")


def _known_before(recording: Recording) -> dict[int, torch.Tensor]:
    """Return the inputs, and the results of all calls but the last."""
    known = {-1 - index: copied(tensor, CPU) for index, tensor in enumerate(recording.inputs)}
    for index, made in enumerate(recording.calls[:-1]):
        [known[index]] = perform(made, known, CPU)
    return known


def _asked_last(plugin: Guard, recording: Recording) -> Prepared | Exception:
    """Check the last call: return the arguments to use, or the reason for the refusal."""
    [part] = pieces(recording, [], range(recording.results))
    known = _known_before(recording)
    last = recording.calls[-1]
    args, kwargs = (fill(given, lambda ref: known[ref.index], CPU) for given in (last.args, last.kwargs))
    try:
        check = watch(plugin).check(part.program).calls.get(part.program.steps[-1].template)
        prepared = None if check is None else check(args, kwargs)
    except (RuntimeError, ProtocolError, UnknownOperatorError) as error:
        return error
    return prepared or Prepared(args, kwargs)


def _is_refused(plugin: Guard, recording: Recording) -> bool:
    [part] = pieces(recording, [], range(recording.results))
    try:
        checked = watch(plugin).check(part.program)
        if checked.refused(_inputs(part, recording), list(part.numbers)):
            return True
        _ask_before(checked, part, recording, dict(enumerate(recording.inputs)), makes=False)
    except (RuntimeError, ProtocolError, UnknownOperatorError):
        return True
    return False


def _inputs(part: RunnableProgram, recording: Recording) -> list[Any]:
    return [recording.inputs[-1 - index] for index in part.inputs]


def _ask_before(
    checked: CheckedProgram, part: RunnableProgram, recording: Recording, values: dict[int, Any], *, makes: bool = True
) -> None:
    """Check each call, and make it."""
    known = {-1 - index: tensor for index, tensor in values.items()}
    produced = 0
    for made, step in zip(recording.calls, part.program.steps, strict=True):
        args = fill(made.args, lambda ref: known[ref.index], CPU)
        kwargs = fill(made.kwargs, lambda ref: known[ref.index], CPU)
        check = checked.calls.get(step.template)
        if check is not None:
            check(args, kwargs)
        if makes:
            for result in perform(made, known, CPU):
                known[produced] = result
                produced += 1


def _expect_steps_accepted(plugin: Guard, recording: Recording, where: str) -> None:
    """Check each step alone, with the results of the steps before it."""
    guard, produced = watch(plugin), 0
    known = {-1 - index: tensor for index, tensor in enumerate(recording.inputs)}
    for made, part in zip(recording.calls, pieces(recording, range(len(recording.calls)), range(recording.results)),
                          strict=True):
        refused = guard.check(part.program).refused([known[index] for index in part.inputs], list(part.numbers))
        expect_equal(dict(refused), {}, f"refused steps of {made.operator} alone", where)
        for result in perform(made, known, CPU):
            known[produced] = result
            produced += 1


_BATCH_NORM = Recording((_IMAGE, *(filled((3,), torch.float32, seed) for seed in range(4))), (
    call("aten::native_batch_norm", Ref(-1), Ref(-2), Ref(-3), Ref(-4), Ref(-5), True, 0.1, 1e-5, results=3),
    call("aten::max_pool2d_with_indices", Ref(0), [2, 2], [2, 2], [0, 0], [1, 1], False, results=2),
    call("aten::max_pool2d_with_indices_backward", Ref(3), Ref(0), [2, 2], [2, 2], [0, 0], [1, 1], False, Ref(4)),
))
_GROUPED = Recording((_QUERY, _TWO_KEYS), (
    call(_ATTENTION, Ref(-1), Ref(-2), Ref(-2), results=2),
    call(f"{_ATTENTION}_backward", Ref(0), Ref(-1), Ref(-2), Ref(-2), Ref(0), Ref(1), 0.0, False, results=3),
))
_RESIZED = Recording((_FOUR,), (
    call("aten::clone", Ref(-1)),
    call("aten::resize_", Ref(0), [3, 3], results=0),
    call("aten::as_strided", Ref(0), [2, 2], [1, 1], 5),
    call("aten::expand", Ref(-1), [3, 4]),
))
_MIXED = Recording(
    (torch.tensor([0, 4, 6]), torch.tensor([0, 3, 8], dtype=torch.uint8), torch.tensor([0, 3, 8], dtype=torch.int32),
     torch.tensor([-1, 255, -1])),
    (call("aten::lcm", Ref(-1), Ref(-2)), call("aten::div.Tensor_mode", Ref(-3), Ref(-4), rounding_mode="trunc")))
_SEGMENTS = Recording((_ROW_PAIRS, torch.tensor([1, 2])), (
    call("aten::segment_reduce", Ref(-1), "max", lengths=Ref(-2), unsafe=True),))
_BAGS = Recording(
    (filled((2, 5), torch.float32, 1), torch.tensor([0, 2, 1, 4, 3, 2]), torch.tensor([0, 3, 6]), torch.arange(0),
     torch.tensor([3, 3])),
    (call("aten::_embedding_bag_backward", Ref(-1), Ref(-2), Ref(-3), Ref(-4), Ref(-5), Ref(-4), 5, False, 0, False,
          None),))
"""The last offset does not begin a bag."""


@law("guard.accepts_eager")
@given(recording=recordings(grouped() + PLAIN + RANDOM))
@example(recording=_BATCH_NORM)
@example(recording=_GROUPED)
@example(recording=_RESIZED)
@example(recording=_MIXED)
@example(recording=_SEGMENTS)
@example(recording=_BAGS)
def test_accepts_eager(subject: Subject, plugin: Guard, recording: Recording) -> None:
    """Check programs that eager accepts, their runs, twice, and every call."""
    run_eager(recording, CPU, seed=0)
    where = f"{subject}: {recording}"
    [part] = pieces(recording, [], range(recording.results))
    checked = watch(plugin).check(part.program)
    values = {index: copied(tensor, CPU) for index, tensor in enumerate(recording.inputs)}
    for run in (1, 2):
        inputs = [values[-1 - index] for index in part.inputs]
        refused = dict(checked.refused(inputs, list(part.numbers)))
        if refused and all(isinstance(error, ProgramTooLargeError) for error in refused.values()):
            _expect_steps_accepted(plugin, recording, where)
        else:
            expect_equal(refused, {}, f"refused steps of run {run}", where)
    _ask_before(checked, part, recording, values)


_LARGE = Recording((_FOUR,), (
    call("aten::expand", Ref(-1), [2**40, 4]),
    call("aten::neg", Ref(-1)),
    call("aten::clone", Ref(0)),
    call("aten::neg", Ref(2)),
    call("aten::zeros", [2**40]),
    call("aten::neg", Ref(1)),
))


@law("guard.bounds_memory")
def test_bounds_memory(subject: Subject, plugin: Guard) -> None:
    """Check a program of small steps and two that would take terabytes, and one that takes a little at a time."""
    [part] = pieces(_LARGE, [], [1, 3, 5])
    watching = watch(plugin)
    refused = watching.check(part.program).refused([_FOUR], list(part.numbers))
    where = f"{subject}: {_LARGE}"
    expect_equal(sorted(refused), [2, 4], "refused steps", where)
    for step, size_bytes in ((2, 2**44), (4, 2**42)):
        expect(str(size_bytes) in str(refused[step]) and str(_GIB) in str(refused[step]), "what is said",
               got=str(refused[step]), wanted=f"a text with {size_bytes} and {_GIB}", where=where)
    source = filled((2**20,), torch.float32, 1)
    for count, wanted in ((8, []), (40, [30, 31])):
        every = Recording((source,), tuple(call("aten::neg", Ref(-1)) for _ in range(count)))
        [kept] = pieces(every, [], range(count))
        [dropped] = pieces(every, [], [])
        bounded = watch(plugin, program_bytes=30 * 2**22)
        expect_equal(sorted(bounded.check(kept.program).refused([source], []))[:2], wanted, "refused steps",
                     f"{subject}: {count} results of 4 MiB that are kept")
        expect_equal(sorted(bounded.check(dropped.program).refused([source], [])), [], "refused steps",
                     f"{subject}: {count} results of 4 MiB that nobody needs")


@law("guard.changes_nothing", effort=0.3)
@given(recording=recordings(grouped() + RANDOM))
@example(recording=_RESIZED)
def test_changes_nothing(subject: Subject, plugin: Guard, recording: Recording) -> None:
    """Check that inputs and process are unchanged by everything that a guard does."""
    [part] = pieces(recording, [], range(recording.results))
    inputs = [copied(tensor, CPU) for tensor in _inputs(part, recording)]

    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                [(bytes_of(tensor), tensor.shape, tensor.stride()) for tensor in inputs]]

    before = state()
    checked = watch(plugin).check(part.program)
    checked.refused(inputs, list(part.numbers))
    expect_equal(state(), before, "state", f"{subject}: {recording}")
