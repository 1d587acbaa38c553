"""The interceptor: registers the device, and lists the operators and functions that need handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from djinn.errors import DeviceNameTakenError
from djinn.kinds.interceptor import FunctionHandler, Handler
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.imports import follow_imports
from djinn_plugins.common.interrupts import use_interrupt_handler
from djinn_plugins.device.interceptor import (
    accelerator,
    checkpoint_files,
    class_factories,
    derived_plans,
    factories,
    fakes,
    functions,
    gradients,
    higher_order,
    jagged,
    layouts,
    methods,
    optimizers,
    process_groups,
    process_switches,
    profiling,
    saving,
    scripting,
    storage_references,
    subclasses,
)
from djinn_plugins.device.interceptor import fast_path as shortcuts
from djinn_plugins.device.interceptor.backend import BackendModule, DeviceGuard, Hooks
from djinn_plugins.device.interceptor.interrupts import interrupts

if TYPE_CHECKING:
    from djinn.session.session import Session

DEVICE_NAME = "remote_accelerator"
_UNCLAIMED = "privateuseone"


def _keep_from_dynamo() -> None:
    """Make ``torch.compile`` run operations on lazy tensors directly, instead of tracing how they are recorded."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    for name in ("__torch_dispatch__", "__torch_function__"):
        dynamo.set_code_exec_strategy(getattr(LazyTensor, name).__func__.__code__, skip)


def _let_tracers_trace() -> None:
    """Make ``make_fx``, and with it ``torch.func.linearize``, record operations on lazy tensors.

    Otherwise it silently treats tensors of unknown classes as constants.
    """
    if LazyTensor not in proxy_tensor.HANDLED_TYPES:
        handled: Any = (*proxy_tensor.HANDLED_TYPES, LazyTensor)
        proxy_tensor.HANDLED_TYPES = handled


def _let_dynamo_capture(dynamo: ModuleType) -> None:
    from djinn_plugins.device.interceptor.graph_capture import let_dynamo_capture

    let_dynamo_capture()


class DeviceInterceptor:
    """Takes PyTorch's spare device, and gives it a name, kernels, and a module ``torch.remote_accelerator``."""

    name = "device"

    def install(self) -> torch.device:
        """Register the device on the first call, and return it.

        Raises:
            DeviceNameTakenError: Another package has taken the spare device.
        """
        taken = torch._C._get_privateuse1_backend_name()
        ours = isinstance(getattr(torch, DEVICE_NAME, None), BackendModule)
        if not ours:
            if taken != _UNCLAIMED:
                raise DeviceNameTakenError(
                    f"PyTorch's one spare device is already {taken!r} in this process.",
                    hint="djinn.capture() works nevertheless; for the device remote_accelerator, run djinn in a "
                    "process without the package that took it.",
                )
            before = torch.accelerator.current_accelerator()
            module = BackendModule()
            _setup_privateuseone_for_python_backend(DEVICE_NAME, module, Hooks(), DeviceGuard())
            accelerator.install(before, module)
            factories.register()
            _keep_from_dynamo()
            _let_tracers_trace()
            fakes.register()
            class_factories.install()
            methods.install()
            subclasses.install()
            saving.guard_constructors()
            storage_references.install()
            profiling.install()
            gradients.notice_optimizers()
            gradients.adapt_backward_passes()
            process_switches.install()
            process_groups.install(DEVICE_NAME)
            use_interrupt_handler(interrupts)
            checkpoint_files.install()
            higher_order.install()
            jagged.install()
            layouts.install()
            scripting.install()
            follow_imports(("torch._dynamo",), _let_dynamo_capture)
        return torch.device(DEVICE_NAME, 0)

    def handlers(self, session: Session) -> Mapping[torch._ops.OpOverload, Handler]:
        """Return handlers of operators that copy between devices, query storages or write into lists."""
        # They are many, and a process that only imports djinn needs none.
        from djinn_plugins.device.interceptor import handlers, list_writes, prims
        from djinn_plugins.device.interceptor import matmul_decomposition as folding
        from djinn_plugins.device.interceptor.custom_operators import WithCustomOperators
        from djinn_plugins.device.sparse import recording as sparse

        layouts.refuse()
        optimizers.follow(device_of(session.backend.welcome).kind)
        shortcuts.follow(session)
        process_switches.follow(session)
        derived_plans.follow(session)
        return WithCustomOperators(session, {**list_writes.handlers(), **prims.handlers(), **handlers.HANDLERS,
                                             **sparse.handlers(), **folding.handlers(session)})

    def functions(self) -> Mapping[Callable[..., Any], FunctionHandler]:
        """Return handlers of functions that start a backward pass or save, and of composites that stay whole."""
        saving.register()
        return functions.FUNCTIONS
