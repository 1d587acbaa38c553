"""What a call returned: its structure, with the identifiers of values in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from djinn.ir.spec import TensorSpec
from djinn.record.tensor import LazyTensor

__all__ = ("Returned", "returned_by", "value_in")

_WHOLE = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType, torch.nn.Module, torch.dtype,
          torch.device, torch.Generator)
"""Classes whose objects contain no tensor that a call has made."""
_CONTAINERS = (dict, list, tuple)


@attrs.frozen
class _Value:
    """Stands for a tensor of the session."""

    value: str


@attrs.frozen(eq=False)
class _Tree:
    """A structure of one of the classes that PyTorch knows: tuples, lists, mappings, model outputs."""

    leaves: list[Any]
    form: Any


@attrs.define(eq=False)
class _Shell:
    """An object of any other class: its content, if its class is derived from a container, and its attributes."""

    kind: Any
    content: Any = None
    attributes: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Returned:
    """What a call returned. It holds none of the session's tensors.

    Attributes:
        values: Identifiers of the values, and their metadata, in the order of the structure.
        is_complete: Whether the values give every tensor in it.
    """

    values: Mapping[str, TensorSpec | None]
    _form: Any
    is_complete: bool = True

    @classmethod
    def listing(cls, values: Mapping[str, TensorSpec]) -> Returned:
        """Make the structure of a tuple."""
        return cls(values, _Reader(lambda _: None, set()).read(tuple(map(_Value, values))))

    @property
    def is_tensor(self) -> bool:
        """Whether the call returned one tensor."""
        return isinstance(self._form, _Value)

    def filled(self, tensors: Mapping[str, Any]) -> Any:
        """Return the structure with tensors in it.

        Args:
            tensors: The tensor for each of ``values``.
        """
        return _filled(self._form, tensors, {})


Named = Callable[[torch.Tensor], tuple[str, TensorSpec | None] | None]


def returned_by(result: Any, named: Named, kept: Iterable[torch.Tensor] = ()) -> Returned | None:
    """Take the structure of a call's result.

    Args:
        result: The result.
        named: Gives the identifier and the metadata of a tensor's value; ``None`` for a tensor that is computed
            elsewhere.
        kept: Tensors that may be computed elsewhere, because they are the same in each call.

    Returns:
        The structure; ``None`` if there is no tensor in it, or an object in it cannot be taken apart.
    """
    reader = _Reader(named, {*map(id, kept)})
    try:
        form = reader.read(result)
    except Exception:  # noqa: BLE001  # attributes of objects of any class may raise anything
        return None
    return Returned(reader.specs, form, reader.is_complete) if reader.specs or not reader.is_complete else None


def value_in(session: Any) -> Named:
    """Return what names the tensors of a session, and those of which it has an upload."""

    def named(tensor: torch.Tensor) -> tuple[str, TensorSpec] | None:
        lazy = tensor if isinstance(tensor, LazyTensor) else session.mixer.uploaded(tensor)
        if lazy is None or lazy._value.released is not session.recorder.released:
            return None
        return f"v{lazy._value.slot.number}", lazy._value.spec

    return named


class _Reader:
    def __init__(self, named: Named, kept: set[int]) -> None:
        self._named = named
        self._kept = kept
        self.specs: dict[str, TensorSpec | None] = {}
        self.is_complete = True
        self._found = 0
        self._shells: dict[int, tuple[Any, Any]] = {}

    def read(self, item: Any) -> Any:
        leaves, form = tree_flatten(item)
        if len(leaves) == 1 and leaves[0] is item:
            return self._leaf(item)
        return _Tree([self._leaf(leaf) for leaf in leaves], form)

    def _leaf(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if item is None or isinstance(item, (*_WHOLE, _Value)):
            return item
        if id(item) not in self._shells:
            return self._shell(item)
        self._found += self._shells[id(item)][0] is not item
        return self._shells[id(item)][0]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        self._found += 1
        found = self._named(tensor)
        if found is None:
            self.is_complete &= id(tensor) in self._kept
            return tensor if id(tensor) in self._kept else None
        value, spec = found
        self.specs[value] = spec
        return _Value(value)

    def _shell(self, item: Any) -> Any:
        """Take an object apart; one without any tensor stays as it is."""
        before, shell = self._found, _Shell(type(item))
        # The object stays alive with its entry, so that no other one gets its identity.
        self._shells[id(item)] = shell, item
        shell.attributes = {name: self.read(value) for name, value in _attributes_of(item)}
        if isinstance(item, _CONTAINERS):
            plain = next(kind for kind in _CONTAINERS if isinstance(item, kind))
            shell.content = self.read(plain(item))
        if self._found > before:
            return shell
        self._shells[id(item)] = item, item
        return item


def _attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(item, "__dict__", {}).items()
    for kind in type(item).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                yield name, getattr(item, name)


def _filled(form: Any, tensors: Mapping[str, Any], made: dict[int, Any]) -> Any:
    if isinstance(form, _Value):
        return tensors[form.value]
    if isinstance(form, _Tree):
        return tree_unflatten([_filled(leaf, tensors, made) for leaf in form.leaves], form.form)
    if not isinstance(form, _Shell):
        return form
    if id(form) in made:
        return made[id(form)]
    content = _filled(form.content, tensors, made)
    if isinstance(content, tuple):
        item = tuple.__new__(form.kind, content)
    else:
        item = form.kind.__new__(form.kind)
        if content is not None:
            (dict.update if isinstance(content, dict) else list.extend)(item, content)
    made[id(form)] = item
    for name, value in form.attributes.items():
        object.__setattr__(item, name, _filled(value, tensors, made))
    return item
