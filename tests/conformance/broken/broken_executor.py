"""A small executor that keeps every law, and others that differ from it in one place each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from djinn.errors import ConfigurationError, SchemaMismatchError
from djinn.hookspecs import hookimpl
from djinn.ir.program import Argument, ConstantArgument, ListArgument, NumberArgument, Program, TorchArgument
from djinn.ir.schema import ReturnKind, facts_of
from djinn.wire.messages import Poisoned
from djinn.wire.tensors import copied, dtype_named, to_dense_cpu
from djinn_plugins.common.kinds.executor import Effects, RandomState, Report
from djinn_plugins.common.memory.tensor_bytes import whole_of
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.executor.pauses import Pause, reason_to_stop

_VALUES = {"executor.equals_eager", "executor.order_kept", "executor.replay_stable", "executor.failure_contained",
           "executor.poison_propagates", "executor.randomness_private", "executor.vacates_exactly"}
BROKEN: dict[str, tuple[str, set[str]]] = {
    "lost-writes": ("executor.order_kept", _VALUES),
    "wrong-strides": ("executor.equals_eager", _VALUES | {"executor.get_copies"}),
    "rounded": ("executor.equals_eager", _VALUES | {"executor.plain_results"}),
    "folded-constants": ("executor.replay_stable", {"executor.failure_contained", "executor.poison_propagates"}),
    "folded-numbers": ("executor.replay_stable", {"executor.failure_contained", "executor.poison_propagates"}),
    "swallowed-failure": ("executor.failure_contained", set()),
    "everything-fails": ("executor.failure_contained", set()),
    "stale-view": ("executor.poison_propagates", {"executor.failure_contained"}),
    "poison-reported": ("executor.poison_propagates", {"executor.failure_contained"}),
    "shared-generator": ("executor.randomness_private", set()),
    "forgetful-generator": ("executor.randomness_private", set()),
    "claims-purity": ("executor.purity_true", set()),
    "forgets-what-was-there": ("executor.undone_exactly", set()),
    "never-stops": ("executor.stops_between_steps", {"executor.pauses_between_steps"}),
    "pauses-once": ("executor.pauses_between_steps", set()),
    "pauses-after-its-steps": ("executor.pauses_between_steps", set()),
    "redoes-what-it-paused-before": ("executor.pauses_between_steps", set()),
    "draws-while-it-pauses": ("executor.pauses_between_steps", set()),
    "writes-in-secret": ("executor.effects_true", set()),
    "furnishes-nothing": ("executor.vacates_exactly", set()),
    "results-in-place": ("executor.repetition_invisible", set()),
    "writes-over-branches": ("executor.growth_invisible", set()),
    "put-reorders": ("executor.put_copies", _VALUES | {"executor.get_copies"}),
    "get-shares": ("executor.get_copies", {"executor.put_copies"}),
    "plain-as-tensor": ("executor.plain_results", _VALUES),
    "absent-left-out": ("executor.plain_results", _VALUES),
    "late-lookup": ("executor.unknown_operator_named", {"executor.schema_mismatch_named"}),
    "any-schema": ("executor.schema_mismatch_named", set()),
    "any-device": ("executor.devices_real", set()),
}
"""Name of each broken executor, the law that it breaks, and others that it may break as a consequence."""

_LOCK = threading.RLock()


class _Random:
    def __init__(self, seed: int) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def get(self) -> torch.Tensor:
        return self.state.clone()

    def set(self, state: torch.Tensor) -> None:
        self.state = state.clone()

    @contextmanager
    def lent(self, flaw: str) -> Iterator[None]:
        theirs = torch.get_rng_state()
        if flaw != "shared-generator":
            torch.set_rng_state(self.state)
        try:
            yield
        finally:
            if flaw not in ("shared-generator", "forgetful-generator"):
                self.state = torch.get_rng_state()
            if flaw != "shared-generator":
                torch.set_rng_state(theirs)


class _Nothing:
    """An undo that undoes nothing."""

    storages: frozenset[int] = frozenset()
    size_bytes = 0

    def restore(self) -> None:
        pass


class _Program:
    can_pause = True

    def __init__(self, program: Program, flaw: str) -> None:
        self._program = program
        self._flaw = flaw
        self._folded: dict[int, list[Any]] = {}
        self._numbers: list[Any] | None = None
        self.room: torch.Tensor | None = None
        self._runs = 0
        self._results: list[Any] = []
        for template in program.templates if flaw != "late-lookup" else program.templates[:1]:
            operator = operator_named(template.operator)
            if facts_of(operator).digest != template.digest and flaw != "any-schema":
                raise SchemaMismatchError(f"{template.operator} has another schema here.")

    @property
    def effects(self) -> Effects:
        everything = frozenset(range(self._program.inputs))
        return Effects() if self._flaw == "writes-in-secret" else Effects(written=everything, changes_storages=True)

    def is_pure(self, numbers: Sequence[Any]) -> bool:
        return self._flaw == "claims-purity"

    def can_undo(self, numbers: Sequence[Any]) -> bool:
        return self._flaw == "forgets-what-was-there"

    def run_with_undo(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report, limit_bytes: int,
    ) -> tuple[list[Any], _Nothing]:
        return self.run_until(stop, inputs, numbers, random, report), _Nothing()

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        return self.run_until((), inputs, numbers, random, report)

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        assert isinstance(random, _Random)
        if self._flaw == "folded-numbers":
            numbers = self._numbers = self._numbers or list(numbers)
        with _LOCK, torch.inference_mode(), random.lent(self._flaw):
            results = self._run(inputs, iter(numbers), report, () if self._flaw == "never-stops" else stop)
            self._runs += 1
            if self._flaw == "results-in-place" and self._runs > 5:
                return self._in_place(results)
            return results

    def _in_place(self, results: list[Any]) -> list[Any]:
        """Copy results into the memory of earlier ones."""
        for index, (kept, result) in enumerate(zip(self._results, results, strict=False)):
            if isinstance(result, torch.Tensor) and kept.shape == result.shape and kept.stride() == result.stride():
                results[index] = kept.copy_(result)
        self._results = results
        return results

    def _run(
        self, inputs: list[Any], numbers: Iterator[Any], report: Report, stop: Sequence[BaseException]
    ) -> list[Any]:
        stopped: Poisoned | None = None
        known: dict[int, Any] = {-1 - index: value for index, value in enumerate(inputs)}
        produced, failed = 0, False
        for position, step in enumerate(self._program.steps):
            template = self._program.templates[step.template]
            operator = operator_named(template.operator)
            operands = [known[operand] for operand in step.operands]
            rest = iter(operands)
            args = [_value(argument, rest, numbers) for argument in template.arguments]
            kwargs = {name: _value(argument, rest, numbers) for name, argument in template.keywords}
            poison = next((operand for operand in operands if isinstance(operand, Poisoned)), None)
            if failed and self._flaw == "everything-fails":
                poison = Poisoned(1)
            if stop and stopped is None and (reason := self._paused(position, stop)) is not None:
                stopped = report(position, reason)
            if stopped is not None:
                results = [stopped] * step.results
            elif poison is not None:
                if self._flaw == "poison-reported":
                    report(position, RuntimeError("an operand is poison"))
                results = [poison] * step.results
                self._spread(poison, _written(operator, args, kwargs), known, inputs)
            else:
                try:
                    results = self._call(operator, position, args, kwargs, bool(operands))
                    if stop and self._flaw == "redoes-what-it-paused-before":
                        results = self._call(operator, position, args, kwargs, bool(operands))
                    if self._flaw == "pauses-after-its-steps":
                        reason_to_stop(stop)
                    if len(results) != step.results:
                        raise RuntimeError(f"{len(results)} results instead of {step.results}")
                except Exception as error:  # any failure is contained
                    failed = True
                    results = [None if self._flaw == "swallowed-failure" else report(position, error)] * step.results
            known.update(enumerate(results, produced))
            produced += step.results
        return [known[index] for index in self._program.keep]

    def _paused(self, position: int, stop: Sequence[BaseException]) -> BaseException | None:
        if self._flaw == "draws-while-it-pauses":
            torch.rand(1)
        if self._flaw == "pauses-after-its-steps" or (position and self._flaw == "pauses-once"):
            return next((reason for reason in stop if not isinstance(reason, Pause)), None)
        return reason_to_stop(stop)

    def _call(self, operator: Any, position: int, args: list[Any], kwargs: dict[str, Any], takes_tensors: bool) -> Any:
        if self._flaw == "folded-constants" and not takes_tensors and not facts_of(operator).is_random:
            if position not in self._folded:
                self._folded[position] = _new_results(operator, operator(*args, **kwargs))
            return self._folded[position]
        if self._flaw == "lost-writes":
            names = facts_of(operator).argument_names
            args = [item.clone() if isinstance(item, torch.Tensor) and name in facts_of(operator).written else item
                    for name, item in zip(names, args, strict=False)]
        if self.room is not None and operator.name() == "aten::cat":
            return [_written_behind(self.room, *args[0])]
        results = _new_results(operator, operator(*args, **kwargs))
        if self._flaw == "rounded" and operator.name() in ("aten::exp", "aten::add.Tensor", "aten::mul.Tensor"):
            results = [result * (1 + 2**-10) for result in results]
        elif self._flaw == "wrong-strides":
            results = [item.contiguous() if isinstance(item, torch.Tensor) else item for item in results]
        elif self._flaw == "plain-as-tensor":
            results = [torch.tensor(item) if isinstance(item, (bool, int, float)) else item for item in results]
        elif self._flaw == "absent-left-out":
            results = [item for item in results if item is not None]
        return results

    def _spread(self, poison: Poisoned, written: list[Any], known: dict[int, Any], inputs: list[Any]) -> None:
        storages = {item.untyped_storage()._cdata for item in written if isinstance(item, torch.Tensor)}
        for index, value in list(known.items()):
            if not isinstance(value, torch.Tensor):
                continue
            same = any(value is item for item in written)
            if same or (value.untyped_storage()._cdata in storages and self._flaw != "stale-view"):
                known[index] = poison
                if index < 0:
                    inputs[-1 - index] = poison


def _written_behind(room: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Write a tensor behind another one, even if that place is taken."""
    before, after = first.shape[2], first.shape[2] + second.shape[2]
    if first.untyped_storage()._cdata != room.untyped_storage()._cdata:
        room.narrow(2, 0, before).copy_(first)
    room.narrow(2, before, second.shape[2]).copy_(second)
    return room.narrow(2, 0, after)


class _SpareRoom:
    def __init__(self, flaw: str) -> None:
        self._flaw = flaw

    def admit(self, program: _Program) -> None:
        if self._flaw == "writes-over-branches":
            program.room = torch.empty(1, 8, 1024, 64)

    def make_ready(self, program: _Program, inputs: Sequence[Any]) -> list[int]:
        return [index for index, value in enumerate(inputs) if program.room is None and self.make_dense(value)]

    def make_dense(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.is_contiguous():
            return False
        with torch.inference_mode():
            dense = value.contiguous()
            value.set_(dense.untyped_storage(), 0, dense.size(), dense.stride())
        return True


def _new_results(operator: Any, returned: Any) -> list[Any]:
    kinds = facts_of(operator).returns
    results: list[Any] = []
    for kind, value in zip(kinds, [returned] if len(kinds) == 1 else returned or (), strict=True):
        if kind is ReturnKind.LIST:
            results += value
        elif kind is not ReturnKind.WRITTEN:
            results.append(value)
    return results


def _written(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    facts = facts_of(operator)
    found: list[Any] = []
    for name, item in [*zip(facts.argument_names, args, strict=False), *kwargs.items()]:
        if name in facts.written:
            found += item if isinstance(item, list) else [item]
    return found


def _value(argument: Argument, operands: Iterator[Any], numbers: Iterator[Any]) -> Any:
    if isinstance(argument, NumberArgument):
        return next(numbers)
    if isinstance(argument, ConstantArgument):
        return argument.value
    if isinstance(argument, ListArgument):
        return [_value(item, operands, numbers) for item in argument.items]
    if not isinstance(argument, TorchArgument):
        return next(operands)
    if argument.kind == "device":
        return torch.device("cpu")
    return dtype_named(argument.name) if argument.kind == "dtype" else getattr(torch, argument.name)


class _Executor:
    device = "cpu"

    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def compile(self, program: Program) -> _Program:
        return _Program(program, self._flaw)

    def spare_room(self) -> _SpareRoom:
        return _SpareRoom(self._flaw)

    def can_offload(self, storage: torch.UntypedStorage) -> bool:
        return bool(storage.resizable())

    def copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return whole_of(storage).clone()

    def offload(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        storage.resize_(data.numel())
        whole_of(storage).copy_(torch.zeros_like(data) if self._flaw == "furnishes-nothing" else data)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = copied(tensor)
        return copy.contiguous() if self._flaw == "put-reorders" else copy

    def get(self, value: torch.Tensor) -> torch.Tensor:
        if self._flaw == "get-shares":
            return value
        with torch.inference_mode(mode=False):
            return copied(to_dense_cpu(value))

    def random_state(self, seed: int) -> _Random:
        return _Random(seed)

    def close(self) -> None:
        """Nothing is open."""


class _Factory:
    def __init__(self, name: str) -> None:
        self.name = name

    def devices(self) -> list[str]:
        return ["cpu"]

    def open(self, device: str) -> _Executor:
        if device != "cpu" and self.name != "any-device":
            raise ConfigurationError(f"There is no device {device!r} here.")
        return _Executor(self.name)


@hookimpl
def djinn_register_executors(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))


