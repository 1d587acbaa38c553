"""Entry point ``torch.backends``: ``import torch`` loads djinn in processes that are set up to use it.

Every ``import torch`` in an environment where djinn is installed runs this, so it imports nothing unless djinn is
wanted, and it never fails.
"""

from __future__ import annotations

import os

__all__ = ("load", "wanted")

_WANTED_BY = ("DJINN_SERVER", "DJINN_SERVERS", "DJINN_CLUSTER", "DJINN_RUN_AS")
_OFF = ("0", "false", "no", "off")


def wanted() -> bool:
    """Whether the environment asks for djinn: ``DJINN_AUTOLOAD`` decides, and without it a server or a mode."""
    said = os.environ.get("DJINN_AUTOLOAD", "").lower()
    return said not in _OFF if said else any(os.environ.get(name) for name in _WANTED_BY)


def load() -> None:
    """Load djinn if it is wanted. A failure is a warning: programs that do not use djinn must not end because of it."""
    if not wanted():
        return
    try:
        from djinn_plugins.run.autoload import load as load_now

        load_now()
    except Exception as error:  # noqa: BLE001  # PyTorch would make an error of `import torch` out of any exception
        import warnings

        # Errors of djinn's own begin with their code.
        text = str(error) if hasattr(error, "code") else f"[DJ202] {type(error).__name__}: {error}."
        warnings.warn(f"djinn was not loaded with `import torch`: {text} `djinn doctor` says more; DJINN_AUTOLOAD=0 "
                      "switches this off.", RuntimeWarning, stacklevel=2)
