"""Where calls on lazy tensors go: one object, set in one place, `djinn.session.runtime`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch

from djinn.record import devices

pending_errors: dict[int, BaseException] = {}
"""Errors propagating through PyTorch, by thread: a device guard may replace one, a warning may drop it."""


class Dispatcher:
    """The special cases of the interceptor, and the session that executes everything else.

    Attributes:
        dispatch: Executes an operator: the running session's recorder; without a session, starts one first.
        functions: Handlers of functions of PyTorch's Python API; see `djinn.kinds.Interceptor.functions`.
        operators: Handlers of operators for the running session; see `djinn.kinds.Interceptor.handlers`.
    """

    __slots__ = ("dispatch", "functions", "operators")

    def __init__(self) -> None:
        self.functions: Mapping[Callable[..., Any], Callable[..., Any]] = {}
        self.end()

    def begin(self, dispatch: Callable[..., Any], operators: Mapping[Any, Callable[..., Any]]) -> None:
        """Use a session that begins."""
        self.dispatch, self.operators = dispatch, operators

    def end(self) -> None:
        """Use no session. The next operation starts one."""
        self.begin(lambda *call: devices.current_session().dispatch(*call), {})


dispatcher = Dispatcher()
"""The dispatcher of this process."""


def torch_dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Execute an operator on lazy tensors; PyTorch calls this below autograd and everything else of its own."""
    try:
        return dispatcher.dispatch(func, args, kwargs or {})
    except BaseException as error:
        # The caller, `LazyTensor.__torch_function__`, needs this error back, and removes it.
        if not torch._C._is_torch_function_enabled():
            pending_errors[get_ident()] = error
        raise
