"""The settings of processes in which PyTorch loads djinn."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("RunSettings",)


@attrs.frozen
class RunSettings:
    """What ``import torch`` does; only environment variables can say that in time."""

    autoload: bool | None = setting(
        None, help="whether `import torch` loads djinn; `None`: if `DJINN_SERVER`, `DJINN_SERVERS`, "
                   "`DJINN_CLUSTER` or `DJINN_RUN_AS` is set")
    run_as: str = setting(
        "", help="the mode of processes that `djinn run` starts, or that load djinn with `import torch`; empty for "
                 "none, and in `djinn run` for the default", allowed="the name of a mode")
