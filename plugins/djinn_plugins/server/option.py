"""Describes how an attribute of `djinn_plugins.server.options.ServeOptions` is given to ``djinn serve``."""

from __future__ import annotations

import attrs

__all__ = ("MIB", "Option")

MIB = 2**20


@attrs.frozen
class Option:
    """An option of the command line, which can also stand in the file of ``--config``.

    Attributes:
        name: Its name, without the dashes in front.
        help: Its effect.
        metavar: How its value is shown; empty for the name of its type.
        variable: Environment variable that sets it, too; empty for none.
        unit: Factor from the option to the attribute.
        reloads: Whether SIGHUP reads it again.
        is_path: Whether a relative value is a path below the current folder.
        shows_default: Whether the help shows the default.
    """

    name: str
    help: str
    metavar: str = ""
    variable: str = ""
    unit: int = 1
    reloads: bool = False
    is_path: bool = False
    shows_default: bool = True

    @property
    def parameter(self) -> str:
        """Name of the command's parameter."""
        return self.name.replace("-", "_")
