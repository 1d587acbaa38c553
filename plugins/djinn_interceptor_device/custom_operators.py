"""Operators that the program has defined in Python, with ``torch.library.custom_op``, and that its server does not run.

Their functions run here, and the operations in them on the server, as if the program had called the functions itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_map_only

from djinn.errors import UnknownOperatorError
from djinn.kinds.interceptor import Handler
from djinn.record import devices
from djinn_interceptor_device.overlaps import WithWrites, ask

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("WithCustomOperators",)

_are_run_there: weakref.WeakKeyDictionary[Session, dict[Any, bool]] = weakref.WeakKeyDictionary()


class WithCustomOperators(WithWrites):
    """Handlers, with one for each such operator."""

    def _writer(self, operator: Any) -> Handler | None:
        # An executor in this process knows them, too.
        is_custom = _function_of(operator) is not None and not self._session.backend.address.startswith("local:")
        return _run if is_custom else super()._writer(operator)


def _function_of(operator: Any) -> Callable[..., Any] | None:
    """Return the function of an operator for this device, if the program has defined one in Python."""
    defined = OPDEFS.get(operator.name().partition(".")[0])
    functions = {} if defined is None else defined._backend_fns
    return next((functions[kind] for kind in (devices.logical_device().type, None, "cuda") if kind in functions), None)


def _run(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function of an operator, or let it be recorded if the server runs it, which its first call finds out."""
    known = _are_run_there.setdefault(session, {})
    if operator not in known:
        known[operator] = _is_run_there(session, operator, args, kwargs)
    function = _function_of(operator)
    return NotImplemented if known[operator] or function is None else function(*args, **kwargs)


def _is_run_there(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # On copies, after everything else: an unknown operator spoils its operands, and what is sent along with it.
    copied_args, copied_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(session.device, copy=True), (args, kwargs))
    session.flush()
    try:
        made = ask(session, operator, copied_args, copied_kwargs)
        session.synchronize()
    except UnknownOperatorError:
        return False
    del made  # alive until here, as what nobody needs is not run
    return True
