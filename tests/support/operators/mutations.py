"""Calls with one to three arguments changed, and sequences that begin with one, made anew from a name and a number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import attrs
import torch
from support.operators.corpus import Corpus, Example, mapped
from support.operators.elements import REAL_NUMBERS, change_together, change_words, make_wild
from support.operators.layouts import STRIDES, dense, laid, tiled
from support.operators.synthesis import SIZES, slots, tensor_for, values_of

from djinn.ir.schema import facts_of
from djinn.ir.spec import tensors_in
from djinn_plugins.common.operators.operators import operator_named

Path: TypeAlias = tuple[str, int]
"""Where an argument is: its name, and its position in a list, or -1."""

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16, torch.bool,
          torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32)
OPAQUE = (torch.uint8, torch.int64, torch.int32)
FEW = 0.3
EXTENTS = (0, 1, 2, 3, 5, 16, 17, 33, 65, 129, 257)
MOST_ELEMENTS = 2**16
WHOLE_NUMBERS = (0, 1, -1, 2, 3, 7, 17, 255, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
LARGE = (2**20, 2**30, 2**31 - 1, 2**31, 2**40, 2**61, 2**62, 2**63 - 1)
WORDS = ("mean", "sum", "none", "linear", "max", "trunc", "floor", "reflect", "valid", "same")
WAYS_TO_LIE = tuple(STRIDES)
TENSORS = (*STRIDES, "empty", "resized", "resized", "rank", "dtype", "wild", "wild", "bits", "shared", "other", "none")
PLAIN = ("number", "flag")
KINDS = tuple(dict.fromkeys(("none", *TENSORS, *PLAIN, "together", "numbers", "words", "unchanged", "scaled",
                             "lifted", "sequence")))
CYCLE = ("any", "strides", "wild", "strides", "together", "dtype", "flag", "strides", "together", "any", "words",
         "flag", "strides", "sequence", "any", "sequence", "numbers")
"""What calls are changed in, one after the other."""
FLAGS = ("bool", "ScalarType", "str", "MemoryFormat")
"""Types of arguments that choose a way through a kernel."""
PLACES = (0, 0, 1, 1, 2)
"""Where blocks lie, see guarded_memory.c: as often before an unmapped page as behind one."""
LIFTED = (2, 3)
"""Dimensions that are put before, or behind, those of tensors of a call."""
LIFTS = ("all", "all", "with dimensions", "alike", "largest")
"""Which tensors get them: all; all but those without dimensions; those of the operand's size. Or the operand gets the
size of the largest."""


@attrs.frozen
class Mutation:
    """A change of one argument.

    Attributes:
        path: Which one.
        kind: How; of `KINDS`.
        seed: Of what it leaves to chance.
    """

    path: Path
    kind: str
    seed: int


@attrs.frozen
class Lift:
    """More dimensions, for an operand that has too few to lie in many ways.

    Attributes:
        path: The operand.
        which: Of `LIFTS`.
        behind: Whether the dimensions are put behind those that are there.
    """

    path: Path
    which: str
    behind: bool


@attrs.frozen
class Plan:
    """A call, as it is made anew in any process that has the same corpus.

    Attributes:
        name: The overload.
        number: Of its calls.
        example: Position of the call that is changed among those that are known.
        scale: An extent that is replaced wherever it occurs, and by what; ``None`` for none.
        lifted: Which tensors get more dimensions; ``None`` for none.
        mutations: What is changed.
        place: Where blocks lie; see guarded_memory.c.
        filling: What new blocks are filled with.
        guards_all: Whether all that is allocated is guarded, and not tensors alone.
        sequence: What calls behind this one are chosen by; ``None`` for none.
    """

    name: str
    number: int
    example: int
    scale: tuple[int, int] | None
    lifted: Lift | None
    mutations: tuple[Mutation, ...]
    place: int
    filling: int
    guards_all: bool
    sequence: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Name what is changed."""
        found = dict.fromkeys(mutation.kind for mutation in self.mutations)
        return (*(found or ("unchanged",)), *_marks(self))


def _marks(plan: Plan) -> tuple[str, ...]:
    """Name what is changed in a call as a whole."""
    marks = {"scaled": plan.scale, "lifted": plan.lifted, "sequence": plan.sequence}
    return tuple(mark for mark, change in marks.items() if change is not None)


def leaves(name: str, values: Mapping[str, Any]) -> list[Path]:
    """List where the arguments of a call are."""
    found: list[Path] = []
    for slot in slots(name):
        value = values.get(slot.name, slot.default)
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            found += ((slot.name, index) for index in range(len(value)))
        found.append((slot.name, -1))
    return found


def planned(name: str, number: int, corpus: Corpus, seed: int = 0) -> Plan:
    """Decide what a call is like, by turns; see `CYCLE`. Known calls are first made as they are."""
    choose = random.Random(f"{name} {number} {seed}")
    known = corpus.examples(name)
    turn = CYCLE[number % len(CYCLE)]
    index = number % len(known) if number < 2 * len(known) else choose.randrange(len(known))
    kind, path, lifted = "", None, None
    if turn == "strides":
        kind = WAYS_TO_LIE[choose.randrange(len(WAYS_TO_LIE))]
        index, path, is_flat = _read_operand(name, corpus, choose) or (index, None, False)
        if path is not None and is_flat:
            lifted = Lift(path, choose.choice(LIFTS), choose.random() < FEW)
    values = values_of(name, known[index])
    paths = leaves(name, values)
    tensors = [other for other in paths if isinstance(at(values, other), torch.Tensor)]
    scale = None
    if tensors and choose.random() < (0.15 if path else 0.3):
        extents = [extent for other in tensors for extent in at(values, other).shape]
        if extents:
            scale = choose.choice(extents), choose.choice(EXTENTS)
    mutations: list[Mutation] = []
    if path is not None:
        mutations = [_mutation(path, kind, choose), *(
            _mutation(choose.choice(tensors), choose.choice(WAYS_TO_LIE), choose)
            for _ in range(choose.choice((0, 0, 0, 1, 2))))]
    elif turn in SPECIAL and choose.random() < 0.9:
        mutations = _special(turn, name, values, paths, tensors, choose)
    if not mutations and paths and turn not in ("strides", "sequence") and number >= len(known):
        for _ in range(choose.choice((1, 1, 2, 3))):
            other = choose.choice(tensors) if tensors and choose.random() < 0.75 else choose.choice(paths)
            mutations.append(_mutation(other, choose.choice(TENSORS) if other in tensors else "number", choose))
    if turn == "sequence" and choose.random() < 0.5:
        mutations = _special(choose.choice(SPECIAL), name, values, paths, tensors, choose)
    return Plan(name, number, index, scale, lifted, tuple(mutations), choose.choice(PLACES),
                choose.choice((0, 0, 0x55, 0xFF)), choose.random() < 0.08,
                choose.randrange(2**31) if turn == "sequence" else None)


def _mutation(path: Path, kind: str, choose: random.Random) -> Mutation:
    return Mutation(path, kind, choose.randrange(2**31))


SPECIAL = ("wild", "together", "dtype", "flag", "words", "numbers")


def _special(
    turn: str, name: str, values: Mapping[str, Any], paths: Sequence[Path], tensors: Sequence[Path],
    choose: random.Random,
) -> list[Mutation]:
    """Change one thing that other changes would hide; nothing if the call has none such."""
    written = facts_of(operator_named(name)).written
    integers = [path for path in tensors if path[0] not in written and at(values, path).dtype in INTEGERS]
    if turn == "flag":
        kinds = {slot.name: slot.kind for slot in slots(name)}
        flags = [path for path in paths if path[1] < 0 and any(word in kinds[path[0]] for word in FLAGS)]
        count = min(len(flags), choose.choice((1, 1, 2)))
        found = [_mutation(path, "flag", choose) for path in choose.sample(flags, count)]
        if found and integers and choose.random() < 0.5:
            found.append(_mutation(choose.choice(integers), choose.choice(("wild", "together")), choose))
        return found
    if turn == "numbers":
        return [_mutation(choose.choice(paths), "numbers", choose)] if _integers(name) else []
    chosen = {"dtype": tensors, "words": [path for path in tensors if at(values, path).dtype in OPAQUE and (
        at(values, path).dim() == 1)]}.get(turn, integers)
    if chosen:
        return [_mutation(choose.choice(chosen), turn, choose)]
    return [_mutation(choose.choice(integers), "together", choose)] if integers else []


def _read_operand(name: str, corpus: Corpus, choose: random.Random) -> tuple[int, Path, bool] | None:
    """Choose a call and a tensor that it reads, and say whether that needs more dimensions to lie in many ways."""
    key = id(corpus), name
    if key not in _operands:
        _operands[key] = _read_operands(name, corpus)
    found, flat = _operands[key]
    if found and (not flat or choose.random() < 0.8):
        return (*choose.choice(found), False)
    return (*choose.choice(flat), choose.random() < 0.8) if flat else None


def is_flat(name: str, corpus: Corpus) -> bool:
    """Whether known calls of an overload read tensors, and none of two dimensions, which could lie in many ways."""
    found, flat = _read_operands(name, corpus)
    return bool(flat) and not found


_Operands: TypeAlias = list[tuple[int, Path]]
_operands: dict[tuple[int, str], tuple[_Operands, _Operands]] = {}
"""By corpus and overload."""


def _read_operands(name: str, corpus: Corpus) -> tuple[_Operands, _Operands]:
    """List the tensors that known calls read: those of two dimensions and more, and others."""
    written = facts_of(operator_named(name)).written
    found: _Operands = []
    flat: _Operands = []
    for index, example in enumerate(corpus.examples(name)):
        values = values_of(name, example)
        for path in leaves(name, values):
            tensor = at(values, path)
            if isinstance(tensor, torch.Tensor) and path[0] not in written:
                (found if sum(extent > 1 for extent in tensor.shape) > 1 else flat).append((index, path))
    return found, flat


def at(values: Mapping[str, Any], path: Path) -> Any:
    """Look an argument up; ``None`` if a change has removed it."""
    found = values.get(path[0])
    if path[1] < 0:
        return found
    return found[path[1]] if isinstance(found, (list, tuple)) and path[1] < len(found) else None


def carried_out(plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """Make the arguments of a call, in new memory that ends where they end."""
    example = corpus.examples(plan.name)[plan.example]
    values = values_of(plan.name, example)
    if plan.scale is not None:
        values = {name: _scaled(item, *plan.scale) for name, item in values.items()}
    if plan.lifted is not None:
        values = _lifted(values, plan.lifted)
    made: dict[str, Any] = {}
    by_path: dict[Path, list[Mutation]] = {}
    for mutation in plan.mutations:
        by_path.setdefault(mutation.path, []).append(mutation)
    described = {slot.name: slot for slot in slots(plan.name)}
    extents = extents_of(values)
    for name, item in values.items():
        if isinstance(item, (list, tuple)) and any(isinstance(member, torch.Tensor) for member in item):
            made[name] = [_tensor(member, by_path.get((name, index), ()), extents) if isinstance(member, torch.Tensor)
                          else member for index, member in enumerate(item)]
        elif isinstance(item, torch.Tensor):
            made[name] = _tensor(item, by_path.get((name, -1), ()), extents)
        else:
            made[name] = item
    for path, mutations in by_path.items():
        for mutation in mutations:
            choose = random.Random(mutation.seed)
            if mutation.kind == "together":
                tensor = at(made, path)
                if isinstance(tensor, torch.Tensor):
                    change_together(made, tensor, _integers(plan.name), choose, extents)
            elif mutation.kind == "numbers":
                _change_numbers(made, plan.name, choose)
            elif mutation.kind in PLAIN:
                made[path[0]] = _plain(made.get(path[0], described[path[0]].default), described[path[0]].kind, choose)
            elif mutation.kind == "none" and path[1] < 0 and described[path[0]].kind.startswith("Optional"):
                made[path[0]] = None
            elif mutation.kind == "shared":
                _share(made, path, choose)
    return made


@cache
def _integers(name: str) -> Mapping[str, str]:
    """Name the arguments of an overload that are integers."""
    return {slot.name: slot.kind for slot in slots(name) if "int" in slot.kind.lower()}


def _change_numbers(made: dict[str, Any], name: str, choose: random.Random) -> None:
    """Change the integers of a call together, to one large number and to what is about half or twice as much."""
    large = choose.choice(LARGE)

    def change(item: Any) -> Any:
        return choose.choice((item, item, 0, large, large - 1, large // 2, min(2 * large, 2**63 - 1), -large)) if (
            type(item) is int) else item

    for slot in slots(name):
        item = made.get(slot.name, slot.default)
        if slot.name in _integers(name) and item is not None:
            made[slot.name] = list(map(change, item)) if isinstance(item, (list, tuple)) else change(item)


def _share(made: dict[str, Any], path: Path, choose: random.Random) -> None:
    """Have an argument be another one, or overlap with it."""
    tensors = [item for value in made.values() for item in (value if isinstance(value, list) else [value])
               if isinstance(item, torch.Tensor)]
    other = choose.choice(tensors)
    mine = at(made, path)
    if not isinstance(mine, torch.Tensor):
        return
    if choose.random() < 0.5 and other.numel() > 1 and other.dim():
        other = other.narrow(choose.randrange(other.dim()), 0, 1) if choose.random() < 0.5 else other.detach()
    elif mine.dtype == other.dtype and mine.numel() and mine.untyped_storage().nbytes() <= (
            other.untyped_storage().nbytes()):
        other = torch.as_strided(other, mine.shape, mine.stride(), 0)
    if path[1] < 0:
        made[path[0]] = other
    elif isinstance(made[path[0]], list):
        made[path[0]][path[1]] = other


def _scaled(item: Any, old: int, new: int) -> Any:
    if isinstance(item, torch.Tensor):
        size = [new if extent == old else extent for extent in item.shape]
        return tiled(item, size) if old in item.shape and math.prod(size) <= MOST_ELEMENTS else item
    if isinstance(item, (list, tuple)):
        return [_scaled(member, old, new) for member in item]
    return new if type(item) is int and item == old and old > 4 else item


def _lifted(values: Mapping[str, Any], lift: Lift) -> dict[str, Any]:
    operand = at(values, lift.path)
    largest = max((tensor.shape for tensor in tensors_in(values.values())), key=math.prod, default=())

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if lift.which == "largest":
            return tiled(tensor, largest) if tensor is operand else tensor
        if (lift.which == "alike" and tensor.shape != operand.shape) or (
                lift.which == "with dimensions" and not tensor.dim()):
            return tensor
        return tiled(tensor, [*tensor.shape, *LIFTED] if lift.behind else [*LIFTED, *tensor.shape])

    return {name: mapped(item, change) for name, item in values.items()}


def _tensor(source: torch.Tensor, mutations: Sequence[Mutation], extents: Sequence[int]) -> torch.Tensor:
    size, dtype = list(source.shape), source.dtype
    stride: Callable[[list[int]], list[int]] | None = None
    changes_values: list[Mutation] = []
    bits = ""
    if not mutations:
        return laid(source, source.shape, source.stride())
    for mutation in mutations:
        choose = random.Random(mutation.seed)
        kind = mutation.kind
        if kind in STRIDES:
            stride = STRIDES[kind](choose)
        elif kind == "empty":
            size = [0] if not size else [0 if choose.random() < 0.5 else extent for extent in size] if (
                choose.random() < 0.5) else [*size[:-1], 0]
        elif kind == "resized" and size:
            dim = choose.randrange(len(size))
            size[dim] = max(0, choose.choice((size[dim] + 1, size[dim] - 1, 1, 2 * size[dim], *EXTENTS)))
        elif kind == "rank":
            size = choose.choice(([], [1, *size], [*size, 1], size[1:], size[:-1], [math.prod(size)]))
        elif kind == "dtype":
            dtype = choose.choice(DTYPES)
        elif kind == "other":
            source = tensor_for("", choose, choose.choice(SIZES), choose.choice(DTYPES))
            size, dtype = list(source.shape), source.dtype
        elif kind in ("wild", "words"):
            changes_values.append(mutation)
        elif kind == "bits":
            bits = choose.choice(("conj", "neg"))
    if math.prod(size) > MOST_ELEMENTS:
        size = list(source.shape)
    made = source
    if list(source.shape) != size:
        made = tiled(source, size)
    if made.dtype != dtype:
        made = made.real.to(dtype) if made.is_complex() and not dtype.is_complex else made.to(dtype)
    steps = stride(size) if stride is not None else made.stride() if made.shape == source.shape else dense(size)
    made = laid(made, size, steps)
    for mutation in changes_values:
        choose = random.Random(mutation.seed)
        if mutation.kind == "words":
            change_words(made, choose)
        else:
            make_wild(made, choose, extents)
    if bits == "conj" and made.is_complex():
        return made.conj()
    return torch._neg_view(made) if bits == "neg" and made.dtype is not torch.bool else made


def _plain(item: Any, kind: str, choose: random.Random) -> Any:
    """Change what is no tensor."""
    if (item is None or choose.random() < 0.1) and kind.startswith("Optional["):
        if item is not None:
            return None
        kind = kind[9:-1]
        item = {"Tensor": None, "ScalarType": torch.float32, "bool": False, "str": "mean"}.get(
            kind, 1.0 if kind in ("float", "number") else [1] if kind.startswith("List") else 1)
    if kind == "Tensor" and item is None:
        return tensor_for("", choose, choose.choice(SIZES), choose.choice(DTYPES[:6]))
    if isinstance(item, bool):
        return not item
    if isinstance(item, int):
        return choose.choice((item + 1, item - 1, 2 * item, -item, *WHOLE_NUMBERS))
    if isinstance(item, (float, complex)):
        return choose.choice((item + 0.5, -item, 2 * item, *REAL_NUMBERS))
    if isinstance(item, torch.dtype):
        return choose.choice(DTYPES)
    if isinstance(item, str):
        return choose.choice(WORDS)
    if isinstance(item, (list, tuple)):
        return _list(list(item), kind, choose)
    return item


def _list(items: list[Any], kind: str, choose: random.Random) -> list[Any]:
    way = choose.random()
    if way < 0.2 or not items:
        return [*items, items[-1] if items else 1]
    index = choose.randrange(len(items))
    if way < 0.4:
        return items[:index] + items[index + 1:]
    if isinstance(items[index], torch.Tensor) or items[index] is None:
        items[index] = items[choose.randrange(len(items))]
        return items
    inner = kind.removeprefix("Optional[").removeprefix("List[").rstrip("]")
    items[index] = _plain(items[index], inner, choose)
    return items


def changed(plan: Plan, made: Mapping[str, Any]) -> list[str]:
    """Name what is really changed in a call: a tensor of one element can be expanded, and is what it was."""
    found = []
    for mutation in plan.mutations:
        tensor = at(made, mutation.path)
        if mutation.kind not in STRIDES or (isinstance(tensor, torch.Tensor) and not tensor.is_contiguous()):
            found.append(mutation.kind)
    return list(dict.fromkeys((*(found or ["unchanged"]), *_marks(plan))))


def extents_of(values: Mapping[str, Any]) -> list[int]:
    """List the extents of a call's tensors, and how many elements they have."""
    return sorted({extent for tensor in tensors_in(values.values()) for extent in (*tensor.shape, tensor.numel())
                   if extent})


__all__ = ("KINDS", "Example", "Mutation", "Plan", "carried_out", "changed", "is_flat", "planned")
