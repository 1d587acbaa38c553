"""Classes in place of PyTorch's that cannot be subclassed, or whose constructors do not know the remote device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ("class_like",)


def class_like(original: type, make: Callable[..., Any]) -> Any:
    """Make a class that is ``original`` for ``isinstance`` and ``issubclass``, and whose call is ``make``."""
    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return subclass is cls or issubclass(subclass, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    return Meta(original.__name__, (), {
        "__doc__": original.__doc__, "__module__": original.__module__})
