"""Arguments for operators that no database calls: lent by operators of the same family, or made up from the schema."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import attrs
import torch
from support.operators.corpus import Corpus, Example, mapped
from support.operators.own_recipes import OWN_RECIPES
from support.operators.recipes import RECIPES

from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.calls import check_of

SIZES = ((3,), (2, 3), (3, 3), (2, 3, 4), (2, 3, 4, 4), (1, 2, 3, 4, 4), (4, 4), (2, 4, 4), (5,), (), (1,), (6, 6))
DTYPES = (torch.float32, torch.int64, torch.float64, torch.bool, torch.complex64, torch.int32, torch.bfloat16,
          torch.uint8)
DENSE = ("float", "double", "int", "long")
_PREFIXES = re.compile(r"^(_foreach_|special_|linalg_|_linalg_|_unsafe_|_amp_foreach_|_)+")
_SUFFIXES = re.compile(r"(_copy|_functional|_differentiable|_ex|_)+$")
_SPELLINGS = (("arc", "a"), ("greater_equal", "ge"), ("less_equal", "le"), ("greater", "gt"), ("less", "lt"),
              ("not_equal", "ne"), ("subtract", "sub"), ("multiply", "mul"), ("true_divide", "div"),
              ("floor_divide", "div"), ("divide", "div"), ("negative", "neg"), ("absolute", "abs"),
              ("concatenate", "cat"), ("concat", "cat"), ("swapaxes", "transpose"), ("swapdims", "transpose"),
              ("moveaxis", "movedim"), ("row_stack", "vstack"), ("clip", "clamp"), ("fix", "trunc"))


def base_of(name: str) -> str:
    """Name an operator without namespace and overload."""
    return name.partition("::")[2].partition(".")[0]


@cache
def family(base: str) -> str:
    """Name what operators have in common that do the same in other ways."""
    stem = _SUFFIXES.sub("", _PREFIXES.sub("", base)) or base
    for long, short in _SPELLINGS:
        stem = stem.replace(long, short)
    return stem.strip("_")


@attrs.frozen
class Slot:
    """One argument of a schema.

    Attributes:
        name: Its name.
        kind: Its type, in the schema's words.
        is_out: Whether a result is written to it.
        by_name: Whether it is passed by name.
        has_default: Whether it may be left out.
        default: What it is then.
    """

    name: str
    kind: str
    is_out: bool
    by_name: bool
    has_default: bool
    default: Any


@cache
def slots(name: str) -> tuple[Slot, ...]:
    """Read the arguments of an overload."""
    return tuple(Slot(argument.name, str(argument.real_type), argument.is_out, argument.kwarg_only,
                      argument.has_default_value(), argument.default_value if argument.has_default_value() else None)
                 for argument in operator_named(name)._schema.arguments)


def example_of(name: str, values: Mapping[str, Any]) -> Example:
    """Make a call of arguments by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for slot in slots(name):
        if slot.by_name or len(args) < slots(name).index(slot):
            if slot.name in values:
                kwargs[slot.name] = values[slot.name]
        elif slot.name in values:
            args.append(values[slot.name])
        elif slot.has_default:
            args.append(slot.default)
    return Example(tuple(args), kwargs)


def values_of(name: str, example: Example) -> dict[str, Any]:
    """List the arguments of a call by name."""
    return {**dict(zip((slot.name for slot in slots(name)), example.args, strict=False)), **example.kwargs}


def proposals(name: str, corpus: Corpus, seed: int, count: int) -> Iterator[Example]:
    """Think of calls of an overload, some of which may be right.

    Args:
        name: The overload.
        corpus: Calls of others.
        seed: Of random choices.
        count: How many to make up at most, beside those that are lent.
    """
    choose = random.Random(f"{name} {seed}")
    own = not name.startswith("aten::")
    for recipe in (OWN_RECIPES if own else RECIPES).get(base_of(name), ()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = recipe()
        described = {slot.name: slot for slot in slots(name)}
        fitting = {word: converted(item, described[word].kind) for word, item in made.items() if word in described}
        yield from _with_outs(name, fitting, corpus, choose)
    lenders = [lender for lender in corpus.calls if lender != name and family(base_of(lender)) == family(base_of(name))]
    lenders.sort(key=lambda lender: (base_of(lender) != base_of(name), lender))
    for lender in lenders[:8]:
        known = corpus.examples(lender)
        for example in choose.sample(known, min(len(known), 12)):
            values = _lent(name, values_of(lender, example), choose)
            if values is not None:
                yield from _with_outs(name, values, corpus, choose)
    for _ in range(count):
        yield from _with_outs(name, _made_up(name, choose), corpus, choose)


def _lent(name: str, lent: Mapping[str, Any], choose: random.Random) -> dict[str, Any] | None:
    given = list(lent.values())
    values: dict[str, Any] = {}
    for position, slot in enumerate(slots(name)):
        if slot.is_out:
            continue
        if slot.name in lent:
            found = lent[slot.name]
        elif slot.has_default:
            continue
        elif position < len(given) and not slot.by_name:
            found = given[position]
        else:
            found = made_up(slot, choose, choose.choice(SIZES), torch.float32)
        values[slot.name] = converted(found, slot.kind)
    return values


def converted(item: Any, kind: str) -> Any:
    """Turn an argument into one of another type."""
    if item is None:
        return None
    if kind.startswith("Optional["):
        kind = kind[9:-1]
    if kind.startswith(("List[Tensor", "List[Optional[Tensor")):
        return item if isinstance(item, (list, tuple)) else [item, item] if isinstance(item, torch.Tensor) else [
            torch.tensor([item])]
    if kind.startswith("List[") and not isinstance(item, (list, tuple)):
        return [_number(item)] * 2
    if kind == "Tensor":
        if isinstance(item, (list, tuple)) and item:
            item = item[0]
        return torch.tensor(item) if isinstance(item, (bool, int, float, complex)) else item
    if any(word in kind for word in ("number", "int", "float", "bool", "Int")) and not kind.startswith("List"):
        return _number(item)
    return item


def _number(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        item = item[0] if item else 1
    if isinstance(item, torch.Tensor):
        return item.reshape(-1)[0].item() if item.numel() else 1
    return item


def _with_outs(name: str, values: Mapping[str, Any], corpus: Corpus, choose: random.Random) -> Iterator[Example]:
    """Add what results are written to: as large as the results are, and empty."""
    outs = [slot for slot in slots(name) if slot.is_out and slot.name not in values]
    if not outs:
        yield example_of(name, values)
        return
    for results in _results_of(name, values):
        wanted = [result for result in results if isinstance(result, torch.Tensor)]
        if len(outs) == 1 and outs[0].kind.startswith("List"):
            yield example_of(name, {**values, outs[0].name: [torch.empty_like(result) for result in wanted]})
        elif len(wanted) >= len(outs):
            yield example_of(name, {**values, **{
                slot.name: torch.empty_like(result) for slot, result in zip(outs, wanted, strict=False)}})
            return
    dtype = choose.choice(DTYPES[:4])
    yield example_of(name, {**values, **{
        slot.name: [torch.empty(0, dtype=dtype)] * 2 if slot.kind.startswith("List") else torch.empty(0, dtype=dtype)
        for slot in outs}})


def _results_of(name: str, values: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Call the overloads that give what this one writes."""
    names = {slot.name for slot in slots(name) if not slot.is_out}
    packet = getattr(torch.ops.aten, base_of(name))
    for overload in packet.overloads():
        other = getattr(packet, overload)
        if not torch._C._dispatch_has_kernel(other.name()):
            continue  # TorchScript's own, for integers and lists
        mine = slots(other.name())
        if {slot.name for slot in mine} - {"dtype", "layout", "device", "pin_memory"} != names - {"dtype"}:
            continue
        if other._schema.is_mutable:
            continue
        example = example_of(other.name(), {key: mapped(item, torch.clone) for key, item in values.items()})
        check = check_of(other, 2**26)
        try:
            # Nothing else stands before this call.
            prepared = None if check is None else check(example.args, example.kwargs)
            args, kwargs = (example.args, example.kwargs) if prepared is None else (prepared.args, prepared.kwargs)
            with torch.no_grad():
                made = other(*args, **kwargs)
        except Exception:  # it was a proposal
            continue
        yield list(made) if isinstance(made, (list, tuple)) else [made]


def _made_up(name: str, choose: random.Random) -> dict[str, Any]:
    size, dtype = choose.choice(SIZES), choose.choice((torch.float32, *DTYPES))
    values: dict[str, Any] = {}
    for slot in slots(name):
        if slot.is_out or (slot.has_default and choose.random() < 0.6):
            continue
        values[slot.name] = made_up(slot, choose, size, dtype)
    return values


def made_up(slot: Slot, choose: random.Random, size: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Make one argument up."""
    kind = slot.kind
    if kind.startswith("Optional["):
        if choose.random() < 0.4:
            return None
        kind = kind[9:-1]
    if kind == "Tensor":
        return tensor_for(slot.name, choose, size if choose.random() < 0.85 else choose.choice(SIZES), dtype)
    if kind.startswith("List["):
        inner = attrs.evolve(slot, kind=kind[5:-1])
        if "Tensor" in kind:
            return [made_up(inner, choose, size, dtype) for _ in range(choose.randint(1, 3))]
        if slot.name in ("size", "shape", "output_size", "sizes"):
            return list(size)
        if slot.name in ("dim", "dims"):
            # Each once, some counted from the end.
            dims = choose.sample(range(len(size)), min(choose.choice((1, 2, 2, len(size))), len(size)))
            return [dim - len(size) * choose.randrange(2) for dim in dims]
        return [made_up(inner, choose, size, dtype) for _ in range(choose.choice((1, 2, len(size), 3)))]
    return _plain(slot.name, kind, choose, dtype)


def _plain(name: str, kind: str, choose: random.Random, dtype: torch.dtype) -> Any:
    if kind in ("int", "SymInt"):
        return choose.choice((0, 1, 1, 2, 2, 3, -1, 4)) if "dim" not in name else choose.choice((0, 0, 1, -1, 2))
    if kind == "float":
        return choose.choice((0.5, 0.5, 0.1, 1.0, 2.0, 0.0))
    if kind == "number":
        return choose.choice((1, 2, 3)) if not dtype.is_floating_point else choose.choice((0.5, 1, 2.0))
    if kind == "bool":
        return choose.random() < 0.5
    if kind == "ScalarType":
        return choose.choice(DTYPES)
    if kind == "str":
        return choose.choice(("mean", "sum", "none", "linear", "ij", "left", "fro", "nuc", "zeros", "same", "valid",
                              "reflect", "trunc", "floor"))
    return {"Layout": torch.strided, "Device": torch.device("cpu"), "MemoryFormat": torch.contiguous_format}.get(kind)


def tensor_for(name: str, choose: random.Random, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor up; small whole numbers where its name speaks of indices or a condition."""
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    if any(word in name for word in ("ind", "target", "offset", "length", "pivots")):
        return torch.randint(0, 2, size, generator=generator)
    if any(word in name for word in ("mask", "condition")):
        return torch.randint(0, 2, size, generator=generator).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.rand(size, dtype=dtype if dtype is not torch.bfloat16 else torch.float32,
                          generator=generator).to(dtype)
    return torch.randint(0, 4, size, generator=generator).to(dtype)

