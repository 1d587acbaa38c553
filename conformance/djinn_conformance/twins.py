"""Twins: one program, line by line, run eagerly on CPU tensors and on the remote device, and compared."""

from __future__ import annotations

import builtins
import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import attrs
import torch

import djinn
from djinn.tensor import LazyTensor
from djinn_conformance.assertions import same_bits, violated
from djinn_conformance.strategies import filled

__all__ = ("Line", "Outcome", "Twin", "compare_metadata", "compare_values", "eager_twin", "remote_twin")

_CPU = torch.device("cpu")
_MOST_RESULTS = 3
_LARGEST = 256
"""Elements of the largest result that a program goes on with."""
_FIELDS = ("type", "dtype", "size", "requires_grad", "is_leaf", "is_inference", "is_view", "base", "version", "grad",
           "numel", "stride", "storage_offset")
_BY_MEMORY = "grad_fn=<AsStridedBackward0>"
_GRADIENT_FUNCTION = re.compile(r"grad_fn=<\w+>")


@attrs.frozen
class Outcome:
    """What a line did.

    Attributes:
        error: Class of the exception that it raised.
        plain: Its value, if it is none of tensors, as text.
        tensors: The tensors that it gave.
    """

    error: type[BaseException] | None
    plain: str
    tensors: tuple[torch.Tensor, ...]


@attrs.frozen
class Line:
    """A line as it ran eagerly.

    Attributes:
        text: The line.
        group: What kind of thing it does.
        names: A name for each tensor that it gave; empty for one too large to go on with.
        known: For each of them, whether the name was there before.
        outcome: What eager made of it, without the tensors.
    """

    text: str
    group: str
    names: tuple[str, ...]
    known: tuple[bool, ...]
    outcome: Outcome

    def __str__(self) -> str:
        names = [name or "_" for name in self.names]
        mode, body = _parted(self.text)
        shown = f"{mode}{', '.join(names)} = {body}" if names and not all(self.known) else self.text
        error = self.outcome.error
        return f"{shown}  # {error.__name__}" if error else shown


def _parted(text: str) -> tuple[str, str]:
    """Part a line into the mode that it runs in and the rest."""
    if not text.startswith("with "):
        return "", text
    mode, _, body = text.partition("(): ")
    return f"{mode}(): ", body


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[CodeType, bool]:
    mode, body = _parted(text)
    try:
        compile(body, text, "eval")
    except SyntaxError:
        return compile(text, text, "exec"), False
    return compile(f"{mode}_ = {body}", text, "exec"), True


def _empty_ready_queue() -> None:
    """Let go what a backward pass that failed has left; its thread keeps it until it goes backward again.

    Operations with low sequence numbers, which begin anew in each thread, come last.

    Source:
        torch/csrc/autograd/engine.cpp (``ReadyQueue``, ``Engine::thread_main``).
    """
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones((), requires_grad=True) * 1))
    thread.start()
    thread.join()
    made[0].backward()


@attrs.define
class Twin:
    """One of the two: the names of a program and what they stand for."""

    space: dict[str, Any]
    is_remote: bool
    _made: list[tuple[str, weakref.ref[torch.Tensor]]] = attrs.field(init=False, factory=list)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The program's tensors by name."""
        return {name: value for name, value in self.space.items() if name[:1] in "tc" and name[1:].isdecimal()}

    def run(self, text: str) -> Outcome:
        """Run a line."""
        code, has_value = _compiled(text)
        try:
            exec(code, self.space)  # noqa: S102  # the line is one of ours
        except Exception as error:  # noqa: BLE001  # compared with what eager raises
            self.space.pop("_", None)
            return Outcome(type(error), f"{type(error).__name__}: {error}", ())
        result = self.space.pop("_") if has_value else None
        if isinstance(result, torch.Tensor):
            return Outcome(None, "", (result,))
        if isinstance(result, (list, tuple)) and result and all(isinstance(item, torch.Tensor) for item in result):
            return Outcome(None, f"{len(result)} tensors", tuple(result[:_MOST_RESULTS]))
        return Outcome(None, repr(result), ())

    def keep(self, names: Sequence[str], outcome: Outcome) -> None:
        """Bind what a line gave."""
        for name, value in zip(names, outcome.tensors, strict=True):
            if name:
                self.space[name] = value
                self._made.append((name, weakref.ref(value)))

    def adopt(self, other: Twin) -> None:
        """Take the tensors of another twin over."""
        self.space.update(other.tensors)
        self._made += other._made

    def immortal(self) -> list[str]:
        """Let everything go, and list the tensors that live on; a graph of autograd's that refers to itself does so."""
        self.space.clear()
        if any(reference() is not None for _, reference in self._made):
            _empty_ready_queue()
            gc.collect()
        return sorted({name for name, reference in self._made if reference() is not None})

    def run_first(self, text: str, group: str, new_name: Callable[[], str]) -> Line:
        """Run a line eagerly, and find names for what it gives."""
        outcome = self.run(text)
        by_identity = {id(value): name for name, value in self.tensors.items()}
        names, known = [], []
        for value in outcome.tensors:
            found = by_identity.get(id(value))
            known.append(found is not None)
            names.append(found or (new_name() if value.numel() <= _LARGEST and value.dim() <= 5 else ""))
        self.keep(names, outcome)
        return Line(text, group, tuple(names), tuple(known), attrs.evolve(outcome, tensors=()))

    def run_again(self, line: Line) -> str:
        """Run a line that ran eagerly before.

        Returns:
            What is different; empty if nothing is, as far as one can tell without data.
        """
        return self.take(line, self.run(line.text))

    def take(self, line: Line, outcome: Outcome) -> str:
        """Compare an outcome with eager's, and bind what there is; says what is different."""
        wanted = line.outcome
        if outcome.error is not wanted.error:
            return f"got {outcome.plain or 'no exception'}, eager {wanted.plain or 'gives a tensor'}"
        if wanted.error is None and not _reads_like(outcome.plain, wanted.plain):
            return f"got {outcome.plain}, eager {wanted.plain}"
        if len(outcome.tensors) != len(line.names):
            return f"got {len(outcome.tensors)} tensors, eager {len(line.names)}"
        for name, is_known, value in zip(line.names, line.known, outcome.tensors, strict=True):
            if is_known and self.space[name] is not value:
                return f"a result is not the object {name}, which eager gives"
        self.keep(line.names, outcome)
        return ""


def _reads_like(plain: str, wanted: str) -> bool:
    """Compare what lines say; of a written base's views, autograd goes by the memory only where it sees it."""
    if _BY_MEMORY in wanted:
        plain, wanted = (_GRADIENT_FUNCTION.sub("", text) for text in (plain, wanted))
    return plain == wanted


def _shown(value: torch.Tensor) -> str:
    return "".join(repr(value).replace(f", device='{value.device}'", "").split())


def _values(*tensors: torch.Tensor) -> list[Any]:
    return [value.tolist() for value in brought_home(tensors)]


def _space(device: torch.device, get_state: Callable[[], Any], set_state: Callable[[Any], None],
           waits: Mapping[str, Any]) -> dict[str, Any]:
    states = [get_state()]

    def save_random() -> None:
        states.append(get_state())

    def restore_random() -> None:
        set_state(states[-1])

    return {"__builtins__": builtins, "torch": torch, "device": device, "filled": filled, "shown": _shown,
            "save_random": save_random, "restore_random": restore_random,
            "random_state": lambda: bytes(get_state().tolist()).hex(), **waits}


def eager_twin() -> Twin:
    """Make the twin that runs eagerly."""
    waits = {"flush": lambda: None, "synchronize": lambda: None,
             "values": lambda *tensors: [value.tolist() for value in tensors]}
    return Twin(_space(_CPU, torch.get_rng_state, torch.set_rng_state, waits), False)


def remote_twin(device: torch.device) -> Twin:
    """Make the twin that runs on the remote device."""
    backend = getattr(torch, device.type)
    waits = {"flush": djinn.flush, "synchronize": djinn.synchronize, "values": _values}
    return Twin(_space(device, backend.get_rng_state, backend.set_rng_state, waits), True)


def _described(twin: Twin, offsets: Mapping[str, int]) -> dict[str, tuple[Any, ...]]:
    tensors = twin.tensors
    by_identity = {id(value): name for name, value in tensors.items()}
    made: dict[str, tuple[Any, ...]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in tensors.items():
            is_remote = isinstance(value, LazyTensor) or (not twin.is_remote and name.startswith("t"))
            try:
                made[name] = ("remote" if is_remote else "local", *_facts(value, by_identity, offsets.get(name, 0)))
            except RuntimeError as error:
                # PyTorch refuses to say whether some views of what has been written require a gradient.
                made[name] = ("refused", str(error)[:60])
    return made


def _facts(value: torch.Tensor, names: Mapping[int, str], offset: int) -> tuple[Any, ...]:
    is_inference = value.is_inference()
    has_elements = value.numel() > 0
    base = value._base
    size = torch.Tensor.size(value)
    return (
        value.dtype, size if value.shape == size else f"{size}, in Python {value.shape}", value.requires_grad,
        value.is_leaf, is_inference, base is not None, names.get(id(base), ""),
        None if is_inference else value._version + offset, _has_gradient(value), value.numel(),
        tuple(step for extent, step in zip(size, torch.Tensor.stride(value), strict=True) if extent > 1)
        if has_elements else None,
        torch.Tensor.storage_offset(value) if has_elements else None,
    )


def version_offset(mine: torch.Tensor, theirs: torch.Tensor) -> int:
    """Tell by how much eager's count of versions is ahead: autograd adds some gradients in place."""
    return 0 if mine.is_inference() or theirs.is_inference() else theirs._version - mine._version


def _has_gradient(value: torch.Tensor) -> bool:
    try:
        return (value.is_leaf or value.retains_grad) and value.grad is not None
    except RuntimeError:
        # A view that autograd cannot follow any more: PyTorch raises whatever one asks.
        return False


def compare_metadata(eager: Twin, remote: Twin, where: Callable[[], str], offsets: Mapping[str, int]) -> None:
    """Compare all that is known of the tensors without data.

    Args:
        eager: One twin.
        remote: The other.
        where: Says where this is.
        offsets: By how much eager's counts of versions are ahead.
    """
    __tracebackhide__ = True
    wanted = _described(eager, {})
    got = _described(remote, offsets)
    if got == wanted:
        return
    if set(got) != set(wanted):
        violated("names", got=str(sorted(got)), wanted=str(sorted(wanted)), where=where())
    for name, theirs in wanted.items():
        for field, mine, eagers in zip(_FIELDS, got[name], theirs, strict=False):
            if mine != eagers:
                violated(f"{field} of {name}", got=str(mine), wanted=str(eagers), where=where())


def compare_values(eager: Twin, remote: Twin, fetched: Sequence[torch.Tensor] | None, where: Callable[[], str]) -> None:
    """Compare the elements of all tensors and of their gradients, bit by bit.

    Args:
        eager: One twin.
        remote: The other.
        fetched: The remote twin's `payload`, brought home already; ``None`` brings it home.
        where: Says where this is.
    """
    __tracebackhide__ = True
    names, tensors = payload(eager)
    _, lazy = payload(remote)
    got = brought_home(lazy) if fetched is None else fetched
    for name, mine, theirs in zip(names, got, tensors, strict=True):
        if not _equal(mine, theirs.detach()):
            violated(f"elements of {name}", got=str(mine.tolist()), wanted=str(theirs.tolist()), where=where())


def brought_home(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring several tensors home at once."""
    made = djinn.materialize(*tensors)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def payload(twin: Twin) -> tuple[list[str], list[torch.Tensor]]:
    """List all that has elements: tensors and gradients, and their names."""
    named: list[tuple[str, torch.Tensor]] = list(twin.tensors.items())
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in tuple(named):
            if _has_gradient(value):
                assert value.grad is not None
                named.append((f"{name}.grad", value.grad))
    return [name for name, _ in named], [value for _, value in named]


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    mine = mine.detach()
    if mine.dtype is not theirs.dtype or mine.shape != theirs.shape:
        return False
    if same_bits(mine, theirs):
        return True
    # NaN equals NaN, whatever its sign; a nought equals only itself.
    if mine.dtype.is_complex:
        return _equal(torch.view_as_real(mine.resolve_conj().resolve_neg()),
                      torch.view_as_real(theirs.resolve_conj().resolve_neg()))
    if mine.dtype is torch.bool:
        # Bytes other than 0 and 1, written through a view of another dtype, are all true.
        return bool(mine.tolist() == theirs.tolist())
    if not mine.dtype.is_floating_point:
        return False
    is_nan = mine.isnan()
    return torch.equal(is_nan, theirs.isnan()) and same_bits(mine[~is_nan], theirs[~is_nan])


def settle(kinds: Iterable[type[BaseException]], held: Iterable[torch.Tensor], where: Callable[[], str]) -> None:
    """Wait until everything that has failed has been reported, each time as eager failed."""
    __tracebackhide__ = True
    expected = tuple(kinds)
    for _ in range(len(expected) + 1):
        try:
            djinn.synchronize()
        except Exception as error:  # noqa: BLE001  # compared with what eager raised
            if type(error) not in expected:
                violated("what is raised at a wait", got=f"{type(error).__name__}: {error}", wanted=str(expected),
                         where=where())
        else:
            break
    for value in held:
        with warnings.catch_warnings():
            try:
                djinn.materialize(value)
            except expected:
                continue
        violated("a result that could not be computed", got="a value", wanted=str(expected), where=where())
