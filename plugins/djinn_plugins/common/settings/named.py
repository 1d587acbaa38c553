"""The settings of named sessions."""

from __future__ import annotations

from typing import Any

import attrs

from djinn.settings import setting
from djinn_plugins.common.settings.connection import MAX_NAME

__all__ = ("NamedSettings",)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        raise ValueError
    return value


@attrs.frozen
class NamedSettings:
    """The name of a session."""

    name: str = setting(
        "", reads=_name, allowed=f"printable text of at most {MAX_NAME} characters",
        help="name of the session: values in `djinn.kept` are there again when another process opens it")
    name_must_exist: bool = setting(
        False, help="whether it is an error if the server has no session of that name")
    name_lease_s: float = setting(
        0.0, help="seconds that a session with a name stays after its process has left; `0`: as long as the server "
                  "allows", minimum=0)
