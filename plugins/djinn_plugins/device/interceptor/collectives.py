"""Collectives of ``torch.distributed``: tensors of the device take part with copies on the CPU.

The processes of a program talk to each other here, not on the server. gloo copies CUDA's tensors in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from djinn.ir.schema import facts_of
from djinn.record.tensor import LazyTensor
from djinn_plugins.device.interceptor.handlers import copy_

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("NAMESPACES", "run")

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_RECEIVE = ("c10d::recv_", "c10d::recv_any_source_")
_expected: set[Any] = set()
"""Unfinished receptions; kept, since PyTorch holds only the part of such an object that is written in C++."""


def run(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a collective on copies.

    It has ended when this returns, also if the program asked for an asynchronous one. Sending and receiving continue
    until the program waits for them: two processes may both begin with either.
    """
    if operator.name() == "_c10d_functional::wait_tensor":
        return args[0]
    written = _lazy(args[0] if _writes_first(operator) else ())
    copies = _copies(session, operator, args, kwargs, written)
    done = operator(*tree_map_only(LazyTensor, lambda tensor: copies[id(tensor)], args),
                    **tree_map_only(LazyTensor, lambda tensor: copies[id(tensor)], kwargs))

    def copy_back() -> None:
        for tensor in written:
            copy_(session, torch.ops.aten.copy_.default, (tensor, copies[id(tensor)]), {})

    if operator.namespace != "c10d":
        arrived = tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, done)
        copy_back()
        return args[0] if written else tree_map_only(torch.Tensor, session.upload, arrived)
    if operator.name() in _RECEIVE:
        return _received(done, copy_back)
    if not written:
        return done
    has_results = isinstance(done, tuple)
    work = _ended(done[-1] if has_results else done, written, copy_back)
    return (args[0], work) if has_results else work


def _writes_first(operator: Any) -> bool:
    """Whether it writes its first argument; the schemas of ``c10d`` do not say so."""
    return operator.name().endswith("_") if operator.namespace == "c10d" else bool(facts_of(operator).written)


def _lazy(items: Any) -> list[LazyTensor]:
    return [item for item in tree_leaves(items) if isinstance(item, LazyTensor)]


def _copies(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
            written: list[LazyTensor]) -> dict[int, torch.Tensor]:
    """Copy the tensors to the CPU, by their identity; outputs are not downloaded."""
    is_output = facts_of(operator).argument_names[0].startswith("output") or operator.name() in _RECEIVE
    read = _lazy((args[1:] if is_output else args, kwargs))
    homes = session.materialize(read) if read else []
    # A tensor may keep the copy that was downloaded.
    copies = {id(tensor): home.clone() for tensor, home in zip(read, homes, strict=True)}
    for tensor in written:
        if id(tensor) not in copies:
            copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copies


def _ended(work: Any, written: list[LazyTensor], copy_back: Callable[[], None]) -> Any:
    """Wait for a collective, and return one that has ended and has the results."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d  # the stub lacks a function
    c10d.Work.unbox(work).wait()
    copy_back()
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(written)
    return c10d._create_work_from_future(future).boxed()


def _received(work: Any, copy_back: Callable[[], None]) -> Any:
    """Return the work that the program waits for: it copies the result."""
    from torch._C._distributed_c10d import Work

    plain = Work.unbox(work)

    class Received(Work):
        def wait(self, *timeout: Any) -> bool:
            has_arrived = plain.wait(*timeout)
            if self in _expected:
                _expected.discard(self)
                copy_back()
            return has_arrived

        def is_completed(self) -> bool:
            return plain.is_completed()

        def _source_rank(self) -> int:
            return plain._source_rank()

    made = Received()
    _expected.add(made)
    return made.boxed()
