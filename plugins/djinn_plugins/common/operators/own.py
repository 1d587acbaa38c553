"""Defining operators of djinn's own in PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from djinn_plugins.common.once import registering

__all__ = ("define_operators",)

_NO_TAGS: Mapping[str, torch.Tag] = MappingProxyType({})


def define_operators(
    schemas: Mapping[str, str], kernels: Mapping[str, tuple[Any, Any]], tags: Mapping[str, torch.Tag] = _NO_TAGS
) -> list[torch._ops.OpOverload]:
    """Define operators in the namespace ``djinn``.

    Args:
        schemas: The schema of each, by name.
        kernels: The function that runs each, on CPU and CUDA, and the one that describes its results without data;
            ``None`` if only a run can tell.
        tags: What PyTorch should know of some of them besides.

    Returns:
        The operators, in the order of their schemas.
    """
    with registering("djinn", "FRAGMENT") as library:
        for name, schema in schemas.items():
            library.define(f"{name}{schema}", tags=(tags[name],) if name in tags else ())
            runs, describes = kernels[name]
            for key in ("CPU", "CUDA"):
                library.impl(name, runs, key)
            if describes is not None:
                library.impl(name, describes, "Meta")
    return [getattr(torch.ops.djinn, name).default for name in schemas]
