"""The session: composed of plugins, it records operations, submits them, and fetches values."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import RLock
from typing import Any

import torch

from djinn.errors import ConfigurationError, DjinnError, SessionClosedError, TransportError
from djinn.ir.flush_policy import AdaptiveFlush
from djinn.ir.phase import ExecutionPhase
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.spec import SpecTable, TensorSpec, tensors_in
from djinn.ir.tape import Node, Tape
from djinn.ir.value import Slot, Value
from djinn.kinds import Classifier, Connection, OperationClass, ShapeInference
from djinn.kinds.backend import Backend, BackendContext, OpenBackend, PluginRegistry
from djinn.kinds.cache import SubmissionCache
from djinn.kinds.classifier import SupportsPhase
from djinn.kinds.interop import HostInterop
from djinn.kinds.layer import SharedState
from djinn.record.call_plans import Binding, CallPlan, Planner, change_metadata
from djinn.record.dispatcher import dispatcher
from djinn.record.recorder import Recorder
from djinn.record.tensor import LazyTensor, wrap
from djinn.session.connecting import connect
from djinn.session.layers import in_order
from djinn.session.single_backend import SingleBackend
from djinn.settings import Config, Settings
from djinn.settings.core import CacheSettings
from djinn.wire.messages import GENERATOR_HANDLE, Description
from djinn.wire.tensors import dtype_named, to_dense_cpu

log = logging.getLogger("djinn.session")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_VIEWS_AND_WRITES = torch._C.DispatchKey.ADInplaceOrView


class Session:
    """A client's session with its executors.

    Args:
        plugins: The plugins that provide its parts, and their settings.
        connections: Open connections, one per executor.
        device: The logical device; if the user chooses among several, the first.

    Concurrency:
        Any thread may record and materialize; submission is serialized. Ctrl-C during submission or a wait cancels the
        submitted work.
    """

    def __init__(self, plugins: PluginRegistry, connections: Sequence[Connection], device: torch.device) -> None:
        self.config = config = plugins.settings(Config)
        self.plugins = plugins
        self.device = device
        self.lock: AbstractContextManager[Any] = plugins.hook.djinn_open_session_lock(
            interrupted=self._interrupted, hurry=self._hurry) or RLock()
        self.tape = Tape()
        self.released: deque[int] = deque()
        self.specs = SpecTable()
        self.closed = False
        self.shared = SharedState()
        """What the layers of the backend share, by type; see `djinn.kinds.backend.BackendContext.shared`."""
        self.switches: tuple[tuple[str, str], ...] = ()
        """PyTorch's process-wide switches that operations are recorded under; see `djinn.ir.program.Template`."""
        self.flush_every = self._usual_flush_every = min(connection.flush_every for connection in connections)
        self.pace = AdaptiveFlush(self.flush_every, is_fixed=False)
        self.flush_after(config.flush_every)
        self.classifier: Classifier = plugins.choose("classifier", "core")
        self._shapes: ShapeInference = plugins.choose("shapes", "meta")
        self.planner = Planner(self._shapes.infer, self.specs, self.check_owner)
        self.recorder = Recorder(self, self._bind, self.planner.plan, is_debugging=config.debug)
        self.dispatch = self.recorder.dispatch
        self.backend: Backend = self.backend_opener()(connections, self.tape, self.released)
        self.mixer: HostInterop = plugins.hook.djinn_open_host_interop(session=self) or HostInterop(self)
        self._captures: list[Callable[[Node], None]] = []

    def backend_opener(self, settings: Settings | None = None) -> OpenBackend:
        """Compose what makes the session's backend: the kernel's, or a plugin's, and what plugins wrap around it.

        Args:
            settings: Settings, if those of the session do not hold.

        Raises:
            PluginError: There are several executors, and no plugin that brings a backend for them.
            ConfigurationError: A setting needs a plugin that is not there.
        """
        plugins = self.plugins
        arrange = plugins.hook.djinn_arrange_programs(session=self)
        chosen = plugins.selection.chosen.get("scheduler")
        if arrange is None and chosen and len(self.config.addresses) == 1:
            raise ConfigurationError(
                f"No plugin asks the scheduler {chosen!r}. Switched off are: {', '.join(sorted(plugins.disabled))}.",
                hint="Switch the plugin on that asks schedulers, or choose none.")
        context = BackendContext(
            settings or plugins.settings, plugins, self.device, self.classifier, self.pace, self.recorder.numbers,
            partial(connect, plugins), self.open_cache, arrange, in_order, self.shared)
        opens: OpenBackend = partial(_open_backend, context)
        for wrap_backend in reversed(context.layers("djinn_wrap_backend")):
            opens = wrap_backend(opens)
        return opens

    def open_cache(self) -> SubmissionCache:
        """Make a cache of results, as the settings say."""
        max_bytes = self.plugins.settings(CacheSettings).result_cache_bytes
        if not max_bytes:
            return SubmissionCache()
        return self.plugins.choose("cache", "results").open(max_bytes, self.classifier)  # type: ignore[no-any-return]

    def stream(self) -> None:
        """Submit pending nodes without waiting and without raising; a broken connection shows at the next wait.

        While another thread submits or waits, they stay pending: who records must not wait for its answer.
        """
        if not self.pace.is_due(self.tape.nodes) or getattr(self.lock, "is_elsewhere", False):
            return
        try:
            self.flush()
        except DjinnError as error:
            log.warning("streaming flush failed; the next materialization reports it: %s", error)

    def flush_after(self, operations: int | str | None) -> None:
        """Set after how many operations pending nodes are submitted; see the setting ``flush_every``."""
        usual = self._usual_flush_every
        self.flush_every = usual if operations == "auto" else int(operations or 0)
        self.pace.set(self.flush_every, is_fixed=operations != "auto")

    def flush(self) -> None:
        """Submit everything pending without waiting for results.

        Raises:
            TransportError: The connection is lost.
        """
        with self.lock:
            self.backend.flush()

    def materialize(self, tensors: Sequence[Any]) -> list[Any]:
        """Fetch values in one round trip. Ordinary tensors are returned unchanged.

        Returns:
            One CPU tensor each, owned by the caller, outside autograd.

        Raises:
            TransportError: The connection is lost.
            Exception: The exception of the operation that should have computed a value.
        """
        lazy = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
        for tensor in lazy:
            self.check_owner(tensor)
        found = self._fetch([tensor._value.slot for tensor in lazy])
        for got, spec in zip(found, [tensor._value.spec for tensor in lazy], strict=True):
            if (getattr(got, "dtype", 0), getattr(got, "shape", 0)) != (spec.dtype, spec.size):
                raise TransportError(f"{self.backend.address} sent no {spec.dtype} of size {tuple(spec.size)}.")
        items = iter(found)
        return [next(items) if isinstance(tensor, LazyTensor) else tensor for tensor in tensors]

    def _fetch(self, slots: Sequence[Slot]) -> list[Any]:
        if not slots:
            return []
        # What arrives is memory, also within a transform of `torch.func`, which would wrap it.
        with torch._C._DisableFuncTorch(), self.lock:
            self.backend.materializations += 1
            return self.backend.fetch(slots, whole=self.flush_every > 0)

    def ask(
        self, plan: CallPlan, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Sequence[Slot],
        numbers: Sequence[Any],
    ) -> tuple[Any, CallPlan | None]:
        """Run an operation at once and fetch only the metadata of its results.

        Returns:
            The operation's return value; and the plan for the next call with this metadata, unless the result depends
            on more than the metadata.

        Raises:
            Exception: Any exception of the operation.
        """
        signature = plan.signature
        outputs = tuple(self._new_slot(slots, alias) for alias in signature.aliases)
        changes_metadata = facts_of(operator).changes_metadata
        written = [slots[index] for index in signature.writes]

        def change(items: Sequence[Any]) -> None:
            change_metadata(args, kwargs, zip(signature.writes, map(self._spec_of, items), strict=True))

        with self.lock:
            if signature.has_effect:
                # A caller that gets an earlier failure here will try again, and must find nothing done.
                self.backend.synchronize()
            node = Node(signature, slots, outputs, numbers)
            self.recorder.append(node)
            try:
                items = self.backend.describe([*outputs, *written])
            except BaseException:
                self.released.extend(slot.number for slot in outputs)
                if changes_metadata:
                    # Some kernels resize their outputs before they refuse. The client must not miss that.
                    with suppress(Exception):
                        change(self.backend.describe(written))
                raise
        with self.recorder.making(plan, args):
            results = [self._described(slot, item) for slot, item in zip(outputs, items, strict=False)]
        if changes_metadata:
            change(items[len(outputs):])
        returned = plan.returned(results, args, kwargs)
        told = plan.told(tuple(None if r is None else r._value.spec for r in results))
        # The watchers have the node already, and need the metadata as well.
        node.signature = told.signature
        depends_on_data = self.recorder.binding(operator).operation_class is OperationClass.DATA_DEPENDENT or (
            # The indices may include a mask.
            torch.Tag.dynamic_output_shape in operator.tags
            and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in((args, tuple(kwargs.values())))))
        # A view that cannot be inferred reaches beyond its tensor, into a storage that only the executor knows.
        if changes_metadata or depends_on_data or plan.may_be_view:
            return returned, None
        return returned, told

    def _described(self, slot: Slot, item: Any) -> LazyTensor | None:
        if not isinstance(item, Description):
            self.released.append(slot.number)
            return None
        spec = self._spec_of(item)
        return wrap(spec, Value(slot, spec, self.recorder.released))

    def _spec_of(self, item: Description) -> TensorSpec:
        return self.specs.intern(torch.Size(item.size), item.stride, item.storage_offset, dtype_named(item.dtype),
                                 self.device)

    def _new_slot(self, inputs: Sequence[Slot], alias: int) -> Slot:
        number = next(self.recorder.numbers)
        return Slot(number, inputs[alias].storage if alias >= 0 else number)

    def trigger(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that returns Python values, and fetch them."""
        binding = self.recorder.binding(operator)
        plan = self.planner.plan(binding, operator, args, kwargs)
        slots, numbers = self.recorder.take_apart(args, kwargs)
        outputs = [self._new_slot(slots, -1) for _ in plan.signature.aliases]
        with self.lock:
            self.recorder.append(Node(plan.signature, slots, outputs, numbers))
            try:
                values = self._fetch(outputs)
            finally:
                self.released.extend(slot.number for slot in outputs)
        return plan.returned(values, args, kwargs)

    def upload(self, tensor: torch.Tensor, device: torch.device | None = None) -> LazyTensor:
        """Copy an ordinary tensor to the executor, or to the executor of a device."""
        dense = to_dense_cpu(tensor)
        number = next(self.recorder.numbers)
        spec = self.specs.of(dense, device or self.device)
        # If the upload fails, this value is destroyed, which frees anything that may have arrived.
        value = Value(Slot(number, number), spec, self.recorder.released)
        with self.lock:
            self.backend.upload(number, dense, device)
        return wrap(spec, value)

    def seed(self, seed: int) -> None:
        """Seed the session's random generators, in program order."""
        with self.lock:
            self.backend.seed(seed)

    def random_state(self, device: torch.device | None = None) -> torch.Tensor:
        """Fetch the state of a device's random generator, ``u8[N]``."""
        index = 0 if device is None else device.index or 0
        return self._fetch([Slot(GENERATOR_HANDLE, index)])[0]  # type: ignore[no-any-return]  # a state is a tensor

    def set_random_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        """Set the state of a device's random generator."""
        with self.lock:
            self.backend.flush()
            self.backend.upload(GENERATOR_HANDLE, state.cpu().contiguous(), device)

    def synchronize(self) -> None:
        """Wait until everything recorded so far has run.

        Raises:
            Exception: The exception of an operation, if it has not been reported yet.
        """
        with self.lock:
            self.backend.synchronize()

    def check_owner(self, tensor: LazyTensor) -> None:
        """Check that a tensor belongs to this session.

        Raises:
            SessionClosedError: It does not.
        """
        if self.closed or tensor._value.released is not self.recorder.released:
            raise SessionClosedError("The tensor belongs to a session that has ended.",
                                     hint="Its value went with that session; compute it again in this one.")

    def producer_of(self, tensor: LazyTensor) -> str:
        """Name the pending operation that produces ``tensor``; empty if there is none."""
        slot = tensor._value.slot
        for node in reversed(self.tape.nodes):
            if slot in node.outputs:
                return node.signature.template.operator
        return ""

    def capture(self, receive: Callable[[Node], None]) -> Callable[[], None]:
        """Pass every node to ``receive`` as it is recorded, until the returned function is called."""
        self._captures.append(receive)
        self._rebind_append()

        def stop() -> None:
            self._captures.remove(receive)
            self._rebind_append()

        return stop

    def _rebind_append(self) -> None:
        plain = self.tape.nodes.append
        captures = tuple(self._captures)

        def append(node: Node) -> None:
            plain(node)
            for receive in captures:
                receive(node)

        self.recorder.append = append if captures else plain

    def stats(self) -> dict[str, int]:
        """Return the counts since the session began."""
        with self.lock:
            operations = self.backend.nodes_taken + len(self.tape)
            return {
                "operations": operations,
                **self.backend.stats(),
                "shape_cache_hits": operations - self.recorder.misses,
                "shape_cache_misses": self.recorder.misses,
                "pending_nodes": len(self.tape),
            }

    def close(self) -> None:
        """End the session: pending nodes that the backend does not send are dropped, and remote values are freed."""
        with self.lock:
            if self.closed:
                return
            stats = self.stats()
            self.closed = True
            interrupt: BaseException | None = None
            try:
                self.backend.close()
            except BaseException as error:  # noqa: BLE001  # raised once the session has ended
                interrupt = error
            self.tape.nodes.clear()
        told = {f"observer {each.name}": partial(each.observe, stats) for each in self.plugins.all("observer")}
        for each in reversed(self.plugins.hook.djinn_session_closed.get_hookimpls()):
            told[f"plugin {each.plugin_name}"] = partial(each.function, *(stats,)[:len(each.argnames)])
        for who, tell in told.items():
            try:
                tell()
            except Exception:
                log.exception("the %s failed at the end of a session", who)
        if interrupt is not None:
            raise interrupt

    def _interrupted(self) -> None:
        """Cancel the submitted work."""
        if not self.closed and hasattr(self, "backend"):
            self.backend.cancel()

    def _hurry(self) -> None:
        """Submit with the next operation."""
        self.pace.limit = 0

    def _bind(self, operator: Any) -> Binding:
        facts = facts_of(operator)
        operation_class = self.classifier.classify(operator)
        return Binding(
            operator=operator,
            facts=facts,
            operation_class=operation_class,
            special=self._special(operator, operation_class),
            erases_floats=not self._shapes.depends_on_numbers(operator),
            is_random=self.classifier.is_random(operator),
            phase_of=self._phase_told(operator),
            switches=self.switches,
        )

    def _phase_told(self, operator: Any) -> Callable[[Sequence[torch.Size]], ExecutionPhase] | None:
        classifier = self.classifier
        if not isinstance(classifier, SupportsPhase) or not classifier.reveals_phase(operator):
            return None
        return lambda sizes: classifier.phase_of(operator, sizes)

    def _special(self, operator: Any, operation_class: OperationClass) -> Callable[..., Any] | None:
        if operator in dispatcher.operators:
            return partial(dispatcher.operators[operator], self)
        facts = facts_of(operator)
        if facts.is_composite and not self.classifier.keep_whole(operator):
            return self.decompose
        if operation_class is OperationClass.TRIGGER or ReturnKind.PLAIN in facts.returns:
            return self.mixer.trigger
        return None

    def decompose(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a composite operator by recording its parts."""
        excluded = torch._C._dispatch_tls_local_exclude_set()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(facts_of(operator).name, _VIEWS_AND_WRITES.name):
            # In inference mode, only the parts show whether they are views or writes.
            excluded = excluded.remove(_VIEWS_AND_WRITES)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            # PyTorch's own kernel, as in eager mode; decompose() would prefer a Python rewrite for some operators.
            return operator._op_dk(_COMPOSITE, *args, **kwargs)


def _open_backend(context: BackendContext, connections: Sequence[Connection], tape: Tape,
                  released: deque[int]) -> Backend:
    """Make the backend for some executors: the kernel's own for one, unless another is chosen."""
    connections = context.wrapped(connections)
    if len(context.settings(Config).addresses) > 1 or "backend" in context.plugins.selection.chosen:
        made: Backend = context.plugins.choose("backend", "fleet").open(connections, tape, released, context)
        return made
    return SingleBackend(connections[0], tape, released, context.arrange, context.pace, context.settings(Config).debug,
                         cache=context.open_cache())
