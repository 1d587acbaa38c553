"""A classifier that goes by schema alone and keeps every law, and others that do not."""

from __future__ import annotations

from typing import Any

import torch

from djinn.hookspecs import hookimpl
from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds import OperationClass

BROKEN: dict[str, tuple[str, set[str]]] = {
    "undecided": ("classifier.total", set()),
    "moody": ("classifier.deterministic", set()),
    "keeps-equal-lazy": ("classifier.triggers_by_schema", set()),
    "everything-brings-home": ("classifier.triggers_by_schema", set()),
    "sizes-nonzero": ("classifier.data_dependent_tagged", set()),
    "pairs-of-one": ("classifier.tuples_by_schema", set()),
    "random-by-name": ("classifier.random_tagged", set()),
    "whole-einsum": ("classifier.whole_is_new", set()),
    "whole-dropout": ("classifier.whole_is_new", set()),
}
"""Name of each broken classifier, the law that it breaks, and others that it may break as a consequence."""

_ADD = "aten::add.Tensor"


class _Classifier:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._asked = 0

    def classify(self, operator: torch._ops.OpOverload) -> Any:
        facts = facts_of(operator)
        if facts.name == _ADD:
            self._asked += 1
            if self._flaw == "moody" and self._asked % 2:
                return OperationClass.REDUCTION
            if self._flaw == "pairs-of-one":
                return OperationClass.TUPLE
            if self._flaw == "everything-brings-home":
                return OperationClass.TRIGGER
        if ReturnKind.PLAIN in facts.returns:
            lazy = self._flaw == "keeps-equal-lazy" and facts.name == "aten::equal"
            return OperationClass.COMPUTE if lazy else OperationClass.TRIGGER
        if torch.Tag.dynamic_output_shape in operator.tags:
            sized = self._flaw == "sizes-nonzero" and facts.name == "aten::nonzero"
            return OperationClass.COMPUTE if sized else OperationClass.DATA_DEPENDENT
        if len(facts.returns) > 1 or ReturnKind.LIST in facts.returns:
            return OperationClass.TUPLE
        return OperationClass.COMPUTE

    def is_random(self, operator: torch._ops.OpOverload) -> Any:
        if self._flaw == "undecided" and operator.name() == _ADD:
            return None
        if self._flaw == "random-by-name":
            return "rand" in operator.name()
        return torch.Tag.nondeterministic_seeded in operator.tags

    def keep_whole(self, operator: torch._ops.OpOverload) -> bool:
        kept = {"whole-einsum": "aten::einsum", "whole-dropout": "aten::dropout"}
        return operator.name() in {"aten::linear", "aten::matmul", kept.get(self._flaw, "")}


@hookimpl
def djinn_register_classifiers(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Classifier(name))
