"""Options of connections from the names of settings."""

from __future__ import annotations

from typing import Any

import attrs

from djinn.kinds.transport import ConnectOptions
from djinn.settings import Settings
from djinn_plugins.common.settings.connection import ResumeSettings, TlsSettings, UploadSettings


def connect_options(**given: Any) -> ConnectOptions:
    """Make options; names of `TlsSettings`, `ResumeSettings` and `UploadSettings` go there."""
    made = [kind(**{name: given.pop(name) for name in attrs.fields_dict(kind) if name in given})
            for kind in (TlsSettings, ResumeSettings, UploadSettings)]
    return ConnectOptions(settings=Settings(*made), **given)
