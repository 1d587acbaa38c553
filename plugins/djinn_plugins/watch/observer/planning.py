"""Measures how long a session needs for calls that are new to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import thread_time
from typing import TYPE_CHECKING, Any

from djinn_plugins.common.tracing.debugging import SHAPE_INFERENCE, follow, show
from djinn_plugins.common.tracing.totals import TOTALS

if TYPE_CHECKING:
    from djinn.record.call_plans import CallPlan
    from djinn.session.session import Session

__all__ = ("SLOW_RULE_S", "watch")

SLOW_RULE_S = 0.1
"""Processor time above which the inference of one call is reported. PyTorch's own rules take less than a hundredth."""


def watch(session: Session) -> None:
    """Measure a session that begins."""
    session.recorder.plan = _measured(session.recorder.plan)
    components = session.config.log_component.split(",") if session.config.log_component else []
    for component in components:
        show(component.strip())
    follow(session)


def _measured(plan: Callable[..., CallPlan]) -> Callable[..., CallPlan]:
    def measured(binding: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        # Of this thread alone: a busy machine makes no rule slow.
        begin_s = thread_time()
        made = plan(binding, operator, args, kwargs)
        seconds = thread_time() - begin_s
        is_slow = seconds > SLOW_RULE_S
        with TOTALS.lock:
            TOTALS.planned.add(seconds)
            TOTALS.unanswered_shapes += made.asks
            TOTALS.slow_shape_rules += is_slow
        if is_slow:
            SHAPE_INFERENCE.info("%s: the shapes of one call took %.0f ms to infer", operator, 1e3 * seconds)
        if SHAPE_INFERENCE.isEnabledFor(logging.DEBUG):
            answer = "the executor is asked" if made.asks else "inferred"
            SHAPE_INFERENCE.debug("%s: %s after %.2f ms", operator, answer, 1e3 * seconds)
        return made

    return measured
