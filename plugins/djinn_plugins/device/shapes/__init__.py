"""Shape inference by running operators on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import ShapeInference


@hookimpl
def djinn_register_shapes(register: Callable[[ShapeInference], None]) -> None:
    """Register the plugin's shape inference."""
    from djinn_plugins.device.shapes.shapes import MetaShapes

    register(MetaShapes())
