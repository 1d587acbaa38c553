"""The version of djinn."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ("djinn_version",)


def djinn_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("djinn-torch")
    except PackageNotFoundError:
        return "unknown, because djinn-torch is not installed"
