"""Facts from an operator's schema: all that djinn needs to know about an operator without knowing its name."""

from __future__ import annotations

import enum
import hashlib
from functools import cache

import attrs
import torch


class ReturnKind(enum.Enum):
    """The kind of one return of a schema."""

    TENSOR = "tensor"
    LIST = "list"
    PLAIN = "plain"
    WRITTEN = "written"
    """An argument that the operator has written, returned again; not a new value."""


@attrs.frozen
class SchemaFacts:
    """Facts of one overload."""

    name: str
    """Qualified overload, ``namespace::name.overload``."""
    digest: str
    """Digest of the schema's text; equal on two machines if they have the same operator."""
    returns: tuple[ReturnKind, ...]
    """Kind of each return."""
    written: frozenset[str]
    """Names of the arguments that it writes."""
    aliases: tuple[str | None, ...]
    """For each return: the argument that it may share storage with."""
    argument_names: tuple[str, ...]
    """Names of all arguments, in order."""
    is_random: bool
    """Whether it draws random numbers: it has the tag, or an argument that is a dropout probability."""
    changes_metadata: bool
    """Whether it changes sizes or strides of an argument in place."""
    is_composite: bool
    """Whether it is decomposed into other operators on every device."""


@cache
def facts_of(operator: torch._ops.OpOverload) -> SchemaFacts:
    """Read an overload's schema."""
    schema = operator._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    by_set = {frozenset(a.alias_info.before_set): a.name for a in schema.arguments if a.alias_info is not None}
    # The annotation of a list of views names no alias set; it refers to the only annotated argument.
    by_set[frozenset()] = next(iter(by_set.values()), "")
    has_out = any(a.is_out for a in schema.arguments)
    return SchemaFacts(
        name=operator.name(),
        digest=hashlib.blake2b(str(schema).encode(), digest_size=8).hexdigest(),
        returns=tuple(_kind_of(r) for r in schema.returns),
        written=frozenset(written),
        aliases=tuple(None if r.alias_info is None else by_set.get(frozenset(r.alias_info.before_set)) or None
                      for r in schema.returns),
        argument_names=tuple(a.name for a in schema.arguments),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags
        or any(a.name.startswith("dropout") for a in schema.arguments),
        changes_metadata=torch.Tag.inplace_view in operator.tags or has_out,
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"),
    )


def _kind_of(value: torch._C.Argument) -> ReturnKind:
    text = str(value.type)
    if value.alias_info is not None and value.alias_info.is_write:
        return ReturnKind.WRITTEN
    if text in ("Tensor", "Optional[Tensor]"):
        return ReturnKind.TENSOR
    return ReturnKind.LIST if text in ("List[Tensor]", "List[Optional[Tensor]]") else ReturnKind.PLAIN
