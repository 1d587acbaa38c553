"""Records operations under PyTorch's process-wide switches that hold when they are recorded.

PyTorch announces no change of a switch. The functions that change them are few, and called rarely, so each is replaced
by one that calls it and then looks. Recording an operation costs nothing more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.backends import ContextProp

from djinn.session import runtime
from djinn_plugins.common.calls import switches
from djinn_plugins.device.interceptor import fast_path

if TYPE_CHECKING:
    from djinn.record.call_plans import Binding
    from djinn.session.session import Session

MAX_REMEMBERED = 8
"""Settings of the switches whose bindings a session keeps; the latest."""
_bindings: dict[switches.Switches, dict[int, Binding]] = {}
_session: Session | None = None


def install() -> None:
    """Replace the functions that change switches; once in a process."""
    replaced: dict[Any, Callable[..., Any]] = {}
    for name in switches.SETTERS:
        plain = getattr(torch._C, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            replaced[plain] = _noticed(plain)
            setattr(torch._C, name, replaced[plain])
    for name in ("torch.backends.cudnn", "torch.backends.mkldnn"):
        for item in vars(type(sys.modules[name])).values():
            if isinstance(item, ContextProp) and item.setter in replaced:
                item.setter = replaced[item.setter]
    if not hasattr(torch.set_flush_denormal, "__wrapped__"):
        made: Any = _noticed(torch.set_flush_denormal)
        torch.set_flush_denormal = made


def _noticed(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def call(*args: Any, **kwargs: Any) -> Any:
        with switches.lock:
            try:
                return change(*args, **kwargs)
            finally:
                if _session is not None and runtime.is_initialized():
                    _use(_session)

    return call


def follow(session: Session) -> None:
    """Record for a session that begins."""
    global _session
    _session = session
    _bindings.clear()
    session.switches = switches.switches()
    _bindings[session.switches] = session.recorder.bindings


def _use(session: Session) -> None:
    now = switches.switches()
    if now == session.switches:
        return
    fast_path.use_switches(session.switches, now, MAX_REMEMBERED)
    session.switches = now
    session.recorder.bindings = _bindings[now] = _bindings.pop(now, {})
    while len(_bindings) > MAX_REMEMBERED:
        del _bindings[next(iter(_bindings))]
