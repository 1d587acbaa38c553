"""Shape inference by running the real kernel on made-up data, which keeps every law, and others that do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.hookspecs import hookimpl
from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds import Inference, OutputSpec

BROKEN: dict[str, tuple[str, set[str]]] = {
    "contiguous": ("shapes.equals_eager", {"shapes.layouts_equal", "shapes.elementwise_layouts"}),
    "no-offset": ("shapes.equals_eager", {"shapes.layouts_equal"}),
    "usual-ones": ("shapes.layouts_equal", {"shapes.elementwise_layouts"}),
    "like-the-last": ("shapes.elementwise_layouts", {"shapes.equals_eager", "shapes.layouts_equal"}),
    "guesses-nonzero": ("shapes.no_guess", set()),
    "answers-trigger": ("shapes.no_guess", set()),
    "lenient-mm": ("shapes.wrong_calls_unanswered", set()),
    "as-before": ("shapes.arguments_reported", set()),
    "tires": ("shapes.deterministic", {"shapes.threads"}),
    "numbers-ignored": ("shapes.numbers_declared", set()),
    "draws": ("shapes.process_untouched", set()),
    "one-desk": ("shapes.threads", set()),
}
"""Name of each broken object, the law that it breaks, and others that it may break as a consequence."""

_FILLS: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.zero_,
    lambda tensor: tensor.fill_(1),
    lambda tensor: tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape)),
)
_ONE_AT_A_TIME = threading.RLock()


class _Shapes:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._asked = 0
        self._desk: Inference | None = None

    def depends_on_numbers(self, operator: torch._ops.OpOverload) -> bool:
        return self._flaw != "numbers-ignored"

    def infer(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Inference | None:
        self._asked += 1
        if self._flaw == "tires" and self._asked % 3 == 0:
            return None
        if self._flaw == "answers-trigger" and operator.name() == "aten::item":
            return Inference((None,), ())
        if self._flaw == "guesses-nonzero" and operator.name() == "aten::nonzero":
            guess = OutputSpec(torch.Size((args[0].numel(), args[0].dim())), (1, args[0].numel()), 0, torch.int64)
            return Inference((guess,), (OutputSpec.of(args[0]),))
        if self._flaw == "lenient-mm" and operator.name() == "aten::mm":
            size = torch.Size((args[0].shape[0], args[1].shape[-1]))
            return Inference((OutputSpec(size, (size[1], 1), 0, args[0].dtype),), tuple(map(OutputSpec.of, args)))
        with _ONE_AT_A_TIME:
            answer = _tried(operator, args, kwargs, keeps_random=self._flaw != "draws")
        if self._flaw == "one-desk":
            self._desk = answer
            time.sleep(0.0002)
            return self._desk
        return self._spoilt(answer, args, kwargs)

    def _spoilt(self, answer: Inference | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inference | None:
        if answer is None:
            return None
        if self._flaw == "as-before":
            return attrs.evolve(answer, arguments=tuple(map(OutputSpec.of, _tensors([args, kwargs]))))
        change = {"contiguous": _contiguous, "usual-ones": _usual_ones,
                  "no-offset": lambda spec: attrs.evolve(spec, storage_offset=0)}
        if self._flaw == "like-the-last" and answer.results and isinstance(answer.results[0], OutputSpec):
            first, (*_, last) = answer.results[0], (OutputSpec((), (), 0, torch.bool), *answer.arguments)
            stride = last.stride if last.size == first.size else first.stride
            return attrs.evolve(answer, results=(attrs.evolve(first, stride=stride), *answer.results[1:]))
        if self._flaw in change:
            return attrs.evolve(answer, results=tuple(
                change[self._flaw](result) if isinstance(result, OutputSpec) else result for result in answer.results))
        return answer


def _contiguous(spec: OutputSpec) -> OutputSpec:
    return attrs.evolve(spec, stride=torch.empty(spec.size, device="meta").stride())


def _usual_ones(spec: OutputSpec) -> OutputSpec:
    """Give dimensions of one element the strides that they would have in a contiguous tensor."""
    usual = torch.empty(spec.size, device="meta").stride()
    return attrs.evolve(spec, stride=tuple(
        wanted if extent == 1 else step for extent, step, wanted in zip(spec.size, spec.stride, usual, strict=True)))


def _tried(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, keeps_random: bool) -> Inference | None:
    """Run on three fillings; where they disagree, the result depends on data."""
    answers = []
    for fill in _FILLS:
        state = torch.get_rng_state()
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                real_args, real_kwargs = _real(args, fill), _real(kwargs, fill)
                answers.append(_read(operator, operator(*real_args, **real_kwargs), _tensors([real_args, real_kwargs])))
        except Exception:  # the executor is asked then
            return None
        finally:
            if keeps_random:
                torch.set_rng_state(state)
    return answers[0] if answers[0] == answers[1] == answers[2] else None


def _real(item: Any, fill: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(item, torch.Tensor):
        whole = torch.empty(item.untyped_storage().nbytes() // item.element_size(), dtype=item.dtype)
        fill(whole)
        return whole.as_strided(item.size(), item.stride(), item.storage_offset())
    if isinstance(item, (list, tuple)):
        return [_real(member, fill) for member in item]
    if isinstance(item, Mapping):
        return {name: _real(member, fill) for name, member in item.items()}
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _read(operator: Any, returned: Any, arguments: Sequence[torch.Tensor]) -> Inference | None:
    kinds = facts_of(operator).returns
    if ReturnKind.PLAIN in kinds:
        return None
    values = () if not kinds else (returned,) if len(kinds) == 1 else returned
    return Inference(tuple(
        None if value is None else OutputSpec.of(value) if isinstance(value, torch.Tensor)
        else tuple(map(OutputSpec.of, value)) for value in values), tuple(map(OutputSpec.of, arguments)))


def _tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, Mapping):
        item = list(item.values())
    return [tensor for member in item for tensor in _tensors(member)] if isinstance(item, (list, tuple)) else []


@hookimpl
def djinn_register_shapes(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Shapes(name))
