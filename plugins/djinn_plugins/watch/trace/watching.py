"""Watches a script: its model is only known when the script first calls a module."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import torch
from torch.nn.modules import module as modules

from djinn.session import runtime
from djinn_plugins.common.tracing.spans import Span, SpanStage
from djinn_plugins.graph.blocks import BLOCKS
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.graph.provenance import ModuleTracker


class ScriptWatch:
    """Keeps the operations that a script records, starting with the first call of its model.

    The model is the first module with parameters that the script's thread calls; it is the outermost one, which
    contains the others.

    Attributes:
        calls: Times of the model's calls.

    Concurrency:
        For one thread.
    """

    def __init__(self) -> None:
        self._watch: ModuleTracker | None = None
        self._model: torch.nn.Module | None = None
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.get_ident()
        self._depth = 0
        self._begin_ns = 0
        self.calls: list[Span] = []

    @property
    def graph(self) -> RecordedGraph | None:
        """The recorded graph; ``None`` if no model was called."""
        return None if self._watch is None else self._watch.graph()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch within the context."""
        handles = [modules.register_module_forward_pre_hook(self._enter),
                   modules.register_module_forward_hook(self._leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stop()
            if self._watch is not None:
                self._watch.stop()

    def _enter(self, called: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._model is None and next(called.parameters(), None) is not None:
            self._begin(called, args)
        if called is self._model:
            if self._depth == 0:
                self._begin_ns = perf_counter_ns()
            self._depth += 1

    def _begin(self, model: torch.nn.Module, args: Any) -> None:
        self._model = model
        session = runtime.current()
        self._watch = ModuleTracker(session, model, modules=True)
        known = set(model._forward_pre_hooks)
        self._watch.start()
        # It is the outermost, since others are asked for by the innermost.
        BLOCKS.set((self._watch, *BLOCKS.get()))
        self._stop = session.capture(self._watch.receiver())
        # The running call took its list of hooks before these were added.
        for number, hook in list(model._forward_pre_hooks.items()):
            if number not in known:
                hook(model, args)

    def _leave(self, called: torch.nn.Module, args: Any, result: Any) -> None:
        if called is not self._model or threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self.calls.append(Span(type(called).__name__, SpanStage.CAPTURE, self._begin_ns, perf_counter_ns(),
                                   threading.current_thread().name))

