"""The settings of the plugin; they are declared without importing PyTorch."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("InteropSettings",)


@attrs.frozen
class InteropSettings:
    """Whether ordinary tensors may be mixed with lazy ones."""

    strict: bool = setting(
        False, help="if an ordinary tensor meets a remote one, raise an error instead of uploading it")
