"""The effects of an interceptor on a process, observed in a separate process.

``python -m djinn_conformance.local_life`` reads names of interceptors. For each, a fork observes local PyTorch, imports
djinn with this interceptor, observes again, and prints the results as JSON. The order of imports matters: before the
first observation, djinn has not been imported. The forks share what PyTorch takes seconds to import.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import faulthandler
import hashlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from djinn_conformance import fakes

__all__ = ("ACTIONS", "LINES", "look", "report_on")

_TIMEOUT_S = 120.0
_SHARED = ("anyio.from_thread", "anyio.to_thread", "attrs", "msgspec", "pluggy", "sympy.tensor.tensor", "torch._dynamo",
           "torch._functorch.aot_autograd", "torch.export._trace", "torch.utils.data")
"""Modules that the observed actions, and djinn, import in any case."""
_WATCHED = ("socket.connect", "socket.bind", "socket.listen", "subprocess.Popen", "os.fork", "os.posix_spawn",
            "os.system")


def _values(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.device), str(tensor.dtype), list(tensor.shape), tensor.detach().tolist()]


def _random() -> list[Any]:
    torch.manual_seed(3)
    first = torch.rand(4).tolist()
    with torch.random.fork_rng():
        torch.randn(5)
    state = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
    return [first, torch.randperm(5).tolist(), torch.nn.functional.dropout(torch.ones(6)).tolist(),
            torch.initial_seed(), state]


def _accelerator() -> list[Any]:
    found = torch.accelerator.current_accelerator(check_available=True)
    return [str(found), torch.accelerator.is_available(), torch.cuda.is_available()]


def _factories() -> list[Any]:
    made = [torch.zeros(2), torch.tensor([1, 2]), torch.arange(3), torch.eye(2), torch.full((1,), 2.5),
            torch.as_tensor([1.0]), torch.linspace(0, 1, 3), torch.empty(0), torch.zeros(2).new_ones(1)]
    return [[type(tensor).__name__, *_values(tensor)] for tensor in made]


def _pinned() -> list[Any]:
    return [torch.ones(2).pin_memory().tolist(), torch.ones(2).is_pinned()]


def _loader() -> list[Any]:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    return [batch.tolist() for [batch] in loader]


def _autocast() -> list[Any]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _values(torch.ones(2, 2) @ torch.ones(2, 2))


def _gradients() -> list[Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return [_values(parameter) for parameter in model.parameters()]


def _saved() -> list[Any]:
    buffer = io.BytesIO()
    module = torch.nn.Linear(2, 2).to("cpu")
    torch.save(module.state_dict(), buffer)
    return [len(buffer.getvalue()) > 0, type(copy.deepcopy(module).weight).__name__]


def _devices() -> list[Any]:
    return [str(torch.get_default_device()), str(torch.get_default_dtype()), str(torch.device("cpu")),
            torch.is_grad_enabled(), torch.get_num_threads()]


ACTIONS: Mapping[str, Callable[[], Any]] = {
    "default device and dtype": _devices,
    "available accelerator": _accelerator,
    "factories": _factories,
    "random numbers": _random,
    "pinned memory": _pinned,
    "DataLoader with pinned memory": _loader,
    "autocast": _autocast,
    "gradients and optimizer": _gradients,
    "saving and copying": _saved,
}
"""Local actions; each returns something that JSON can represent."""


def look() -> dict[str, Any]:
    """Run the local actions; an exception is recorded as an outcome."""
    seen: dict[str, Any] = {}
    for name, action in ACTIONS.items():
        try:
            seen[name] = action()
        except Exception as error:  # noqa: BLE001  # an action that fails before must fail in the same way afterwards
            seen[name] = f"{type(error).__name__}: {error}"
    return seen


def _home(tensor: torch.Tensor) -> Any:
    """Fetch a tensor; the result must be an ordinary one."""
    moved = tensor.detach().cpu()
    return [type(moved).__name__, str(moved.device), str(moved.dtype), moved.tolist()]


def _in_place(device: torch.device) -> Any:
    base = torch.zeros(3, 2, device=device)
    view = base.t()[1]
    view += 2
    base[0] = 7
    return [_home(base), _home(view)]


def _module(device: torch.device) -> Any:
    weight = torch.arange(6, dtype=torch.float32).view(2, 3) / 4
    model = torch.nn.Linear(3, 2)
    model.load_state_dict({"weight": weight, "bias": torch.ones(2)})
    model.to(device)
    x = torch.ones(4, 3, device=device, requires_grad=True)
    torch.nn.functional.relu(model(x)).sum().backward()
    return [_home(model.weight), _home(model.weight.grad), _home(x.grad)]  # type: ignore[arg-type]  # backward made them


LINES: Mapping[str, Callable[[torch.device], Any]] = {
    "factories": lambda device: [_home(torch.ones(2, device=device)), _home(torch.arange(4, device=device)),
                                 _home(torch.tensor([[1, 2]], device=device)), _home(torch.eye(2, device=device))],
    "copies": lambda device: _home(torch.arange(4).to(device).to(torch.float64)),
    "arithmetic": lambda device: _home(torch.ones(3, 3, device=device) @ torch.eye(3, device=device) * 2 - 1),
    "views": lambda device: _home(torch.arange(6, device=device).view(2, 3).t()[1:]),
    "writes in place": _in_place,
    "module and gradients": _module,
    "values": lambda device: [torch.tensor(2.5, device=device).item(), bool(torch.ones((), device=device) > 0),
                              torch.arange(3, device=device).sum().item()],
    "data-dependent sizes": lambda device: _home(torch.tensor([0, 1, 2], device=device).nonzero()),
    "device of results": lambda device: (torch.ones(2, device=device) + 1).device.type == device.type,
}
"""Lines of a user's program, for any device."""


def _compared(lines: Mapping[str, Callable[[torch.device], Any]], device: torch.device) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, line in lines.items():
        wanted = line(torch.device("cpu"))
        try:
            got = line(device)
        except Exception as error:  # noqa: BLE001  # reported with the line's name; the others are tried as well
            got = f"{type(error).__name__}: {error}"
        seen[name] = [got, wanted]
    return seen


def _native_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def report_on(name: str) -> dict[str, Any]:
    """Install an interceptor in this process and return what changed."""
    before = look()
    opened: list[str] = []
    sys.addaudithook(lambda event, _: opened.append(event) if event in _WATCHED else None)
    threads, native = threading.active_count(), _native_threads()
    states = torch.get_rng_state(), random.getstate()
    os.environ["DJINN_PLUGINS"] = ",".join(filter(None, [os.environ.get("DJINN_PLUGINS", ""), f"interceptor={name}"]))

    import djinn
    from djinn.plugins import Plugins, PluginSelection

    events = list(opened)
    changed = {
        "threads": threading.active_count() - threads,
        "native threads": max(0, _native_threads() - native),
        "state of the generators": not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate(),
    }
    once = look()
    changed["session running"] = djinn.is_initialized()
    interceptor = Plugins.load(PluginSelection.parse(os.environ["DJINN_PLUGINS"])).choose("interceptor")
    devices = [interceptor.install(), interceptor.install()]
    twice = look()
    djinn.init()
    return {"before": before, "once": once, "twice": twice, "devices": list(map(str, devices)),
            "parsed": str(torch.device(str(devices[0]))), "is_device": isinstance(devices[0], torch.device),
            "opened": events, "changed": changed, "arrivals": _compared(LINES, devices[0]),
            "fakes": _compared(fakes.LINES, devices[0])}


@cache
def _observer() -> subprocess.Popen[str]:
    path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    process = subprocess.Popen(
        [sys.executable, "-m", "djinn_conformance.local_life"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "DJINN_SERVER": ""}, text=True)
    atexit.register(process.communicate)  # closes its input, which ends it
    return process


def observe(name: str) -> dict[str, Any]:
    """Run `report_on` in a process of its own.

    Raises:
        AssertionError: It failed, or did not end in time.
    """
    process = _observer()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    seen: dict[str, Any] = json.loads(process.stdout.readline() or '{"problem": "ended"}')
    if "problem" in seen:
        raise AssertionError(f"a process with the interceptor {name!r} {seen['problem']}")
    return seen


def _report(name: str) -> None:
    """Print what a fork finds out about an interceptor; the fork's output is this process's."""
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what plugins print is not the answer
                answer = report_on(name)
        except BaseException:  # noqa: BLE001  # reported; plugins may raise anything
            answer = {"problem": f"failed:\n{traceback.format_exc()[-4000:]}"}
        print(json.dumps(answer), flush=True)  # noqa: T201  # the answer that `observe` reads
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        print(json.dumps({"problem": f"ended with {status}"}), flush=True)  # noqa: T201  # as above


if __name__ == "__main__":
    for module in _SHARED:
        importlib.import_module(module)
    for line in sys.stdin:
        _report(line.strip())
