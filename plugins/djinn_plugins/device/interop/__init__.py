"""Lets ordinary tensors take part in operations on lazy ones. Without this plugin, they are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl
from djinn.settings import Declarations

if TYPE_CHECKING:
    from djinn.kinds.interop import HostInterop
    from djinn.session.session import Session

__all__ = ("djinn_add_settings", "djinn_open_host_interop")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare whether mixing is an error."""
    from djinn_plugins.device.interop.settings import InteropSettings

    settings.add(InteropSettings)


@hookimpl
def djinn_open_host_interop(session: Session) -> HostInterop:
    """Upload ordinary tensors that are used together with lazy ones."""
    from djinn_plugins.device.interop.interop import UploadingInterop

    return UploadingInterop(session)
