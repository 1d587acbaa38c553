"""A captured graph whose tensors are remote: recorded once, and then submitted as one known program in each call."""

from __future__ import annotations

import enum
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from djinn.errors import DjinnError
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.device.dynamo.autograd_templates import is_plain_autograd
from djinn_plugins.device.dynamo.checkpoints import checkpointed, restore_checkpoints
from djinn_plugins.device.dynamo.remote_gradients import TrainedPlan, look, record_trained
from djinn_plugins.device.dynamo.remote_plans import RemotePlan, record_remotely

if TYPE_CHECKING:
    from djinn.session.session import Session

log = logging.getLogger("djinn.dynamo")

MAX_OPERATIONS = 100_000
"""Operations in the plans that a compiled graph keeps; the least recently used are dropped first. Plans of one program
for several sizes share most of their memory, and count less."""
_RANDOM_STATE = ("torch.random", "torch.remote_accelerator")
"""Modules whose functions act on random generators, which a program cannot repeat."""


class _Unplanned(enum.Enum):
    """The state of calls without a plan: unknown, or seen once, so that the next call makes the plan."""

    UNKNOWN = enum.auto()
    SEEN = enum.auto()


_UNKNOWN, _SEEN = _Unplanned.UNKNOWN, _Unplanned.SEEN
_Plan: TypeAlias = RemotePlan | TrainedPlan | _Unplanned | None


def is_remote(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a captured graph has remote tensors."""
    device = devices.logical_device().type
    found = [*inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    return any(isinstance(item, torch.Tensor) and item.device.type == device for item in found)


class RemoteGraph:
    """The callable that Dynamo calls in place of captured code on remote tensors.

    Concurrency:
        May be called from any thread.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        restore_checkpoints(module)
        self._module = module
        self._run: Callable[..., Sequence[Any]] = module.forward
        nodes = list(module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        kinds = [type(node.meta.get("example_value")) for node in inputs]
        self._tensors = [index for index, kind in enumerate(kinds) if issubclass(kind, torch.Tensor)]
        self._plain = [index for index, kind in enumerate(kinds) if not issubclass(kind, torch.Tensor)]
        self._can_repeat = all(map(_is_repeatable, nodes)) and not [*module.parameters(), *module.buffers()]
        # Operators that run parts of the graph again keep tensors in other ways than autograd.
        self._can_be_trained = not any(
            node.target is checkpointed or isinstance(node.target, torch._ops.HigherOrderOperator) for node in nodes)
        self._plans: OrderedDict[tuple[Any, ...], _Plan] = OrderedDict()
        self._weights = 0
        self._session: weakref.ref[Session] | None = None

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Run the graph.

        Raises:
            DjinnError: The session has failed.
            Exception: The error of an operation that is refused when it is recorded.
        """
        session = runtime.current()
        operands = [arguments[index] for index in self._tensors]
        if not self._may_repeat(session, operands):
            return self._run(*arguments)
        trained = _trained(operands)
        if trained and not (self._can_be_trained and is_plain_autograd()):
            return self._run(*arguments)
        key = (
            trained, torch.is_inference_mode_enabled(), session.switches, torch._C._get_flash_sdp_enabled(),
            torch._C._get_math_sdp_enabled(), *[arguments[index] for index in self._plain],
            *[operand._value.spec for operand in operands])
        with session.lock:
            if self._session is None or self._session() is not session:
                self._plans.clear()
                self._weights, self._session = 0, weakref.ref(session)
            plan = self._plans.get(key, _UNKNOWN)
            if isinstance(plan, _Unplanned):
                results, plan = self._record(session, plan, arguments, operands, is_trained=bool(trained))
                self._remember(key, plan)
                return results
            self._plans.move_to_end(key)
            if plan is None or (plan.written and _share_memory(operands)):
                return self._run(*arguments)
            results = plan.run(session, operands)
            if session.flush_every:
                # The executor works while the client prepares the next call.
                _submit(session)
            return results

    def _record(
        self, session: Session, known: _Unplanned, arguments: Sequence[Any], operands: Sequence[Any], *,
        is_trained: bool,
    ) -> tuple[Sequence[Any], _Plan]:
        if not is_trained:
            return record_remotely(session, lambda: self._run(*arguments), operands)
        if known is _UNKNOWN:
            results, may_be_planned = look(session, lambda: self._run(*arguments), operands)
            return results, _SEEN if may_be_planned else None

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            replaced = list(arguments)
            for index, leaf in zip(self._tensors, leaves, strict=True):
                replaced[index] = leaf
            return self._run(*replaced)

        return record_trained(session, run, operands)

    def _may_repeat(self, session: Session, operands: Sequence[Any]) -> bool:
        return (
            self._can_repeat
            and not _is_captured(session)
            and not torch._C._len_torch_dispatch_stack()
            and {*map(type, operands)} <= {LazyTensor}
        )

    def _remember(self, key: tuple[Any, ...], plan: _Plan) -> None:
        self._weights += _weight(plan) - (_weight(self._plans[key]) if key in self._plans else 0)
        self._plans[key] = plan
        while self._weights > MAX_OPERATIONS and len(self._plans) > 1:
            _, dropped = self._plans.popitem(last=False)
            self._weights -= _weight(dropped)


def _weight(plan: _Plan) -> int:
    return plan.weight if isinstance(plan, (RemotePlan, TrainedPlan)) else 1


def _trained(operands: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Whether each operand needs a gradient; empty if none does."""
    if not torch.is_grad_enabled():
        return ()
    with torch._C.DisableTorchFunctionSubclass():
        needs = tuple([operand.requires_grad for operand in operands])
    return needs if any(needs) else ()


def _is_repeatable(node: torch.fx.Node) -> bool:
    """Whether a node does the same in each call, as far as the captured code shows."""
    if getattr(node.target, "__module__", None) in _RANDOM_STATE:
        return False
    leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return not any(isinstance(item, torch.Generator) for item in leaves)


def _is_captured(session: Session) -> bool:
    """Whether a capture receives each node as it is recorded."""
    return session.recorder.append != session.tape.nodes.append


def _share_memory(operands: Sequence[LazyTensor]) -> bool:
    return len({operand._value.slot.storage for operand in operands}) < len(operands)


def _submit(session: Session) -> None:
    """Let the executor begin. A broken connection shows at the next wait."""
    try:
        session.flush()
    except DjinnError as error:
        log.warning("an early submission failed; the next materialization reports it: %s", error)
