"""A session that runs nothing: operations are recorded and kept in this process.

A graph of ``torch.fx`` consists of functions, methods, modules and composite operators. How the remote device would
record them is decided in many places: by the interceptor, the classifier, shape inference and PyTorch's own dispatcher.
Therefore nothing is translated here. Instead, the graph runs in a rehearsal, on lazy tensors without values, and the
operations that would have been recorded on the tape are the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.errors import UnsupportedTensorError
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.spec import tensors_in
from djinn.ir.value import Slot, Value
from djinn.kinds import OperationClass, RemoteExecutor, SubmissionCache
from djinn.kinds.backend import OpenBackend
from djinn.record.tensor import LazyTensor, wrap
from djinn.session.session import Session
from djinn.settings import Settings
from djinn.wire.tensors import is_dense
from djinn_plugins.common.memory.tensor_bytes import describe

if TYPE_CHECKING:
    from djinn.ir.program import ProgramLayout
    from djinn.ir.tape import Node
    from djinn.wire.messages import Description, Welcome

HINT = "djinn.capture() records what is done with data."


class DryRunSession(Session):
    """Records like a running session, separately from it.

    Args:
        running: The session whose plugins and settings are used, and whose executor decides between kernels.

    Concurrency:
        For the thread that created it.
    """

    def __init__(self, running: Session) -> None:
        connection: Any = _NoConnection(running)
        self._running = running
        parts: Any = _Parts(running)
        super().__init__(parts, [connection], running.device)
        self._asked: tuple[Any, tuple[Any, ...], dict[str, Any]] = (None, (), {})

    def backend_opener(self, settings: Settings | None = None) -> OpenBackend:
        """Give a backend that runs nothing."""
        return lambda connections, tape, released: _NoBackend(self._running, self._answers)

    def stand_in(self, tensor: torch.Tensor) -> LazyTensor:
        """Return a tensor as an upload of ``tensor`` would; only its metadata is used, so it may be a fake tensor."""
        size, stride = torch.Size(map(_hint, tensor.size())), tuple(map(_hint, tensor.stride()))
        if not is_dense(tuple(size), stride):
            stride = torch.empty_strided(size, stride, device="meta").clone().stride()
        spec = self.specs.intern(size, stride, 0, tensor.dtype, self.device)
        number = next(self.recorder.numbers)
        with torch._C._InferenceMode(tensor.is_inference()):
            return wrap(spec, Value(Slot(number, number), spec, self.recorder.released))

    def upload(self, tensor: torch.Tensor, device: torch.device | None = None) -> LazyTensor:
        """Return a tensor as an upload would; nothing is sent."""
        return self.stand_in(tensor)

    def ask(
        self, plan: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Sequence[Slot],
        numbers: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Determine metadata that cannot be inferred, by a trial run.

        Raises:
            UnsupportedTensorError: It depends on data.
        """
        dtypes = {tensor.dtype for tensor in tensors_in((args, tuple(kwargs.values())))}
        if self.recorder.binding(operator).operation_class is OperationClass.DATA_DEPENDENT or (
            torch.Tag.dynamic_output_shape in operator.tags and not dtypes.isdisjoint((torch.bool, torch.uint8))
        ):
            raise UnsupportedTensorError(f"The size of what {facts_of(operator).name} gives depends on data.",
                                         hint=HINT)
        self._asked = operator, args, kwargs
        return super().ask(plan, operator, args, kwargs, slots, numbers)

    def _answers(self) -> list[Description | None]:
        """Run the operation in question on zeros, and describe its results and the values that it writes."""
        operator, args, kwargs = self._asked
        facts = facts_of(operator)
        arguments = [_zeros(item) for item in args]
        keywords = {name: _zeros(item) for name, item in kwargs.items()}
        with torch.inference_mode(mode=False), torch.no_grad():
            returned = operator(*arguments, **keywords)
        values = (returned,) if len(facts.returns) == 1 else returned or ()
        made = [member for kind, value in zip(facts.returns, values, strict=True) if kind is not ReturnKind.WRITTEN
                for member in (value if kind is ReturnKind.LIST else (value,))]
        named = {**dict(zip(facts.argument_names, arguments, strict=False)), **keywords}
        made += tensors_in([named[name] for name in facts.argument_names if name in facts.written and name in named])
        return [None if member is None else describe(member) for member in made]


class Beside(TorchDispatchMode):
    """Redirects this thread's operations on lazy tensors, and its factories on their device, to a rehearsal."""

    def __init__(self, rehearsal: DryRunSession) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped there
        self._rehearsal = rehearsal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        items = (*args, *kwargs.values())
        if not any(isinstance(tensor, LazyTensor) for tensor in tensors_in(items)):
            if not any(isinstance(item, torch.device) and item.type == self._rehearsal.device.type for item in items):
                return func(*args, **kwargs)
            kwargs = _completed(func, args, kwargs)
        binding = self._rehearsal.recorder.binding(func)
        if binding.special is not None:
            with self:
                made = binding.special(func, args, kwargs)
            if made is not NotImplemented:
                return made
        # Tracers use Python meta kernels to infer layouts, which differ.
        with torch._C._DisablePythonDispatcher():
            return self._rehearsal.recorder.record(binding, func, args, kwargs)


def _completed(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Make the default dtype explicit if a factory's result has it, as the device's own kernels do."""
    if kwargs.get("dtype") is not None or all(argument.name != "dtype" for argument in factory._schema.arguments):
        return kwargs
    made = factory(*args, **{**kwargs, "device": torch.device("meta")})
    is_default = made.dtype.is_floating_point or made.dtype.is_complex
    return {**kwargs, "dtype": made.dtype} if is_default else kwargs


def _hint(extent: Any) -> int:
    """Return an extent; for a dynamic one, its value during tracing."""
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else int(extent)


def _zeros(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        reach = sum((extent - 1) * step for extent, step in zip(item.size(), item.stride(), strict=True))
        length = item.storage_offset() + reach + 1 if item.numel() else item.storage_offset()
        return torch.zeros(length, dtype=item.dtype).as_strided(item.size(), item.stride(), item.storage_offset())
    if isinstance(item, (list, tuple)):
        return [_zeros(member) for member in item]
    return torch.device("cpu") if isinstance(item, torch.device) else item


class _Parts:
    """The running session's plugins, with a setting of the rehearsal's own."""

    def __init__(self, running: Session) -> None:
        self.hook = running.plugins.hook
        self.settings = running.plugins.settings.changed(flush_every=None)
        self.choose = running.plugins.choose


class _NoConnection:
    """What a session wants to know of a connection before it is used."""

    flush_every = 0

    def __init__(self, running: Session) -> None:
        self.address: str = running.backend.address
        self.welcome: Welcome = running.backend.welcome


class _NoBackend:
    """Takes what a session hands over, and gives nothing back but descriptions.

    It is a `djinn.kinds.Backend` for all that a graph's making needs, and refuses the rest.
    """

    device_count = 1
    executors: Sequence[RemoteExecutor] = ()

    def __init__(self, running: Session, answers: Callable[[], list[Description | None]]) -> None:
        self.address: str = running.backend.address
        self.welcome: Welcome = running.backend.welcome
        self.materializations = 0
        self.nodes_taken = 0
        self._answers = answers

    def flush(self) -> None:
        """Leave the tape unchanged."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send nothing."""

    def seed(self, seed: int) -> None:
        """Do nothing: there are no random numbers."""

    def describe(self, slots: Sequence[Slot]) -> list[Description | None]:
        """Describe the results of the operation in question."""
        return self._answers()

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedTensorError: Always.
        """
        raise UnsupportedTensorError("The model asks for the values of a tensor while its graph is made.", hint=HINT)

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> NoReturn:
        """Refuse: nothing runs here."""
        raise UnsupportedTensorError("The model runs a compiled piece while its graph is made.", hint=HINT)

    def cancel(self) -> None:
        """Cancel nothing: nothing runs."""

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Keep no results: there are none."""

    def stats(self) -> Mapping[str, int]:
        """Count nothing."""
        return {}

    def close(self) -> None:
        """Close nothing."""
