"""A guard that keeps every law, djinn's own behind another name, and others that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.errors import ProtocolError, UnknownOperatorError
from djinn.hookspecs import hookimpl
from djinn.ir.program import Program
from djinn.kinds import ShapeInference
from djinn_plugins.common.kinds.guard import Bounds, CallCheck, Prepared
from djinn_plugins.guard.guard import CoreGuard

BROKEN: dict[str, tuple[str, set[str]]] = {
    "reads-files": ("guard.refuses_files", set()),
    "trusts-pointers": ("guard.refuses_pointers", set()),
    "takes-anything": ("guard.refuses_misfits", {"guard.refuses_files", "guard.refuses_pointers"}),
    "asks-nothing": ("guard.refuses_lies", {"guard.refuses_overlap", "guard.stays_inside"}),
    "writes-overlaps": ("guard.refuses_overlap", set()),
    "trusts-strides": ("guard.stays_inside", set()),
    "refuses-views": ("guard.accepts_eager", {"guard.bounds_memory", "guard.changes_nothing"}),
    "counts-nothing": ("guard.bounds_memory", set()),
    "draws": ("guard.changes_nothing", set()),
}
"""Name of each broken object, the law that it breaks, and others that it may break as a consequence."""


@attrs.frozen
class _Checked:
    inner: Any
    flaw: str
    calls: Mapping[int, Any]

    def refused(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Mapping[int, Exception]:
        if self.flaw == "draws":
            torch.rand(1)
        if self.inner is None:
            return {}
        found = self.inner.refused(inputs, numbers)
        return {} if self.flaw == "counts-nothing" else found


class _Watch:
    def __init__(self, flaw: str, bounds: Bounds, shapes: ShapeInference) -> None:
        self._flaw = flaw
        self._watch = CoreGuard().watch(bounds, shapes)

    def check(self, program: Program) -> _Checked:
        names = [template.operator for template in program.templates]
        if self._flaw == "refuses-views" and "aten::expand" in names:
            raise ProtocolError("No views here.")
        try:
            checked = self._watch.check(program)
        except UnknownOperatorError:
            is_file = any("from_file" in name for name in names)
            if self._flaw in ("takes-anything", "reads-files" if is_file else "trusts-pointers"):
                return _Checked(None, self._flaw, {})
            raise
        except ProtocolError:
            if self._flaw == "takes-anything":
                return _Checked(None, self._flaw, {})
            raise
        calls = {} if self._flaw == "asks-nothing" else checked.calls
        return _Checked(checked, self._flaw, {index: self._weakened(check) for index, check in calls.items()})

    def _weakened(self, check: CallCheck) -> CallCheck:
        def weak(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared | None:
            try:
                prepared = check(args, kwargs)
            except RuntimeError as error:
                if self._flaw == "writes-overlaps" and "single memory location" in str(error):
                    return None
                raise
            return None if self._flaw == "trusts-strides" else prepared

        return weak


class _Guard:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def watch(self, bounds: Bounds, shapes: ShapeInference) -> _Watch:
        return _Watch(self._flaw, bounds, shapes)


@hookimpl
def djinn_register_guards(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Guard(name))
