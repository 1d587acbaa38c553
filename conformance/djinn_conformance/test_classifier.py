"""Laws of classifiers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds import Classifier, OperationClass
from djinn_conformance.assertions import expect, expect_equal, violated
from djinn_conformance.laws import law
from djinn_conformance.oracle import run_eager
from djinn_conformance.programs import new_results
from djinn_conformance.samples import DATA_DEPENDENT
from djinn_conformance.strategies import filled
from djinn_conformance.subjects import Subject
from djinn_plugins.common.operators.operators import operator_named


@lru_cache(maxsize=1)
def _overloads() -> tuple[torch._ops.OpOverload, ...]:
    """List every overload of the namespace ``aten`` that can be dispatched."""
    return tuple(operator_named(name) for name in sorted(torch._C._dispatch_get_all_op_names())
                 if name.startswith("aten::"))


def _verdicts(plugin: Classifier, operator: torch._ops.OpOverload) -> tuple[Any, Any, Any]:
    return plugin.classify(operator), plugin.is_random(operator), plugin.keep_whole(operator)


@law("classifier.total")
def test_total(subject: Subject, plugin: Classifier) -> None:
    """Classify everything."""
    assert len(_overloads()) > 3000, "PyTorch's operators were not found; the kit is wrong"
    for operator in _overloads():
        where = f"{subject}: {operator.name()}"
        try:
            verdict, is_random, keep_whole = _verdicts(plugin, operator)
        except Exception as error:
            raise AssertionError(
                f"verdict: got {type(error).__name__}: {error}, should be an answer [{where}]") from error
        expect(isinstance(verdict, OperationClass), "class", got=verdict, wanted="an OperationClass", where=where)
        expect(is_random is True or is_random is False, "is_random", got=is_random, wanted="a bool", where=where)
        expect(keep_whole is True or keep_whole is False, "keep_whole", got=keep_whole, wanted="a bool", where=where)


@law("classifier.deterministic")
def test_deterministic(subject: Subject, plugin: Classifier) -> None:
    """Classify again, in another order."""
    first = {operator: _verdicts(plugin, operator) for operator in _overloads()}
    for operator in random.Random(0).sample(_overloads(), len(_overloads())):
        expect_equal(_verdicts(plugin, operator), first[operator], "second verdict", f"{subject}: {operator.name()}")


@law("classifier.triggers_by_schema")
def test_triggers_by_schema(subject: Subject, plugin: Classifier) -> None:
    """Compare with the schemas' returns."""
    for operator in _overloads():
        returns = zip(operator._schema.returns, facts_of(operator).returns, strict=True)
        plain = [str(value.type) for value, kind in returns if kind is ReturnKind.PLAIN]
        expect_equal(plugin.classify(operator) is OperationClass.TRIGGER, bool(plain), "being a trigger",
                     f"{subject}: {operator.name()} returns {', '.join(plain) or 'tensors only'}")


@law("classifier.data_dependent_tagged")
def test_data_dependent_tagged(subject: Subject, plugin: Classifier) -> None:
    """Classify operators whose result sizes were seen to depend on elements, for any arguments."""
    for first, second in DATA_DEPENDENT:
        operator = first.calls[0].operator
        sizes = [[tuple(value.shape) for index, value in run_eager(recording, torch.device("cpu")).values.items()
                  if index >= 0] for recording in (first, second)]
        assert sizes[0] != sizes[1], f"{first} and {second} have results of one size; the sample is wrong"
        if operator.name() == "aten::index.Tensor" or facts_of(operator).is_composite:
            # Without a mask the sizes are known, and shape inference is queried for each call; a composite is recorded
            # as its parts.
            continue
        expect_equal(plugin.classify(operator), OperationClass.DATA_DEPENDENT, "class",
                     f"{subject}: {operator.name()} gives results of {sizes[0]} or {sizes[1]}")


@law("classifier.tuples_by_schema")
def test_tuples_by_schema(subject: Subject, plugin: Classifier) -> None:
    """Compare with the schemas' returns."""
    for operator in _overloads():
        returns = facts_of(operator).returns
        if plugin.classify(operator) is OperationClass.TUPLE and len(returns) < 2 and ReturnKind.LIST not in returns:
            violated("class", got="TUPLE", wanted="another, as its schema returns at most one tensor",
                     where=f"{subject}: {operator._schema}")


@law("classifier.random_tagged")
def test_random_tagged(subject: Subject, plugin: Classifier) -> None:
    """Compare with PyTorch's tag."""
    for operator in _overloads():
        if torch.Tag.nondeterministic_seeded in operator.tags:
            expect_equal(plugin.is_random(operator), True, "is_random",
                         f"{subject}: {operator.name()} is tagged nondeterministic_seeded")


_EQUATIONS = ("i->i", "ij->ij", "ij->ji", "ii->i", "ij->i", "ij,jk->ik", "bij->bji")
_SIZES = ((), (3,), (1, 3), (3, 3), (2, 3, 3), (1, 3, 4, 4), (1, 2, 3, 3, 3))


def _guesses(kind: str, size: tuple[int, ...]) -> list[Any]:
    """Return values worth trying for an argument of a type."""
    tensor = filled(size, torch.float32, 1)
    table: dict[str, list[Any]] = {
        "Tensor": [tensor, torch.zeros(size, dtype=torch.int64)],
        "Optional[Tensor]": [None],
        "List[Tensor]": [[tensor], [tensor, filled(size, torch.float32, 2)]],
        "int": [0, 1, -1],
        "number": [1, 0.5],
        "float": [0.0, 1.0],
        "bool": [False, True],
        "List[int]": [[0], [1], list(size), [-1]],
        "str": list(_EQUATIONS),
        "Device": [torch.device("cpu")],
    }
    return table.get(kind, [None])


def _calls(operator: torch._ops.OpOverload) -> Iterator[list[Any]]:
    """Create calls of an operator by its schema: vary each argument without a default separately, then the others."""
    arguments = [argument for argument in operator._schema.arguments if not argument.is_out]
    for size in _SIZES:
        base = [argument.default_value if argument.has_default_value() else _guesses(str(argument.type), size)[0]
                for argument in arguments if not argument.kwarg_only]
        yield base
        for position, argument in enumerate(argument for argument in arguments if not argument.kwarg_only):
            for guess in _guesses(str(argument.type), size):
                yield [*base[:position], guess, *base[position + 1 :]]


def _storages(item: Any) -> set[int]:
    if isinstance(item, torch.Tensor):
        return {item.untyped_storage()._cdata}
    return set().union(*map(_storages, item)) if isinstance(item, (list, tuple)) else set()


@law("classifier.whole_is_new")
def test_whole_is_new(subject: Subject, plugin: Classifier) -> None:
    """Call every operator that is kept whole, in many ways, and check the storages of the results."""
    for operator in filter(plugin.keep_whole, _overloads()):
        silent = [index for index, alias in enumerate(facts_of(operator).aliases) if alias is None]
        if not silent:
            continue
        for args in _calls(operator):
            try:
                with torch.no_grad():
                    returned = operator(*args)
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                continue
            if _storages(args) & _storages(new_results(operator, returned)):
                shown = ", ".join(f"float32{list(item.shape)}" if isinstance(item, torch.Tensor) else repr(item)
                                  for item in args)
                violated("keep_whole", got="True", wanted="False, as the result shares an argument's storage",
                         where=f"{subject}: {operator.name()}({shown})")
