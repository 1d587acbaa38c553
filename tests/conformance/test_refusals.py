"""The list of what a guarded server refuses, held against the guard; and a guard that refuses what is not listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from djinn_conformance import specs
from djinn_conformance.families import families
from djinn_conformance.refusals import is_listed, parse_refusals, refusals
from djinn_conformance.variants import variants_of
from djinn_guard_core.allowlist import require_allowed

from djinn.errors import UnknownOperatorError

_GOOD = """
[[refused]]
operators = 'aten::add\\..*'
reason = "It is refused for the sake of this test."
link = "nowhere.py"
"""


def _operators() -> Iterator[torch._ops.OpOverload]:
    for family in families():
        for spec in family.operators:
            yield spec.operator
            yield from (other.operator for other in variants_of(spec))


def _is_refused(operator: torch._ops.OpOverload) -> bool:
    try:
        require_allowed(operator, frozenset())
    except UnknownOperatorError:
        return True
    return False


def test_the_guard_refuses_exactly_what_is_listed() -> None:
    differing = {operator.name(): _is_refused(operator) for operator in _operators()
                 if _is_refused(operator) != is_listed(operator)}
    assert not differing


def test_each_entry_of_the_list_is_about_something() -> None:
    assert refusals()
    for refusal in refusals():
        assert any(refusal.covers(operator) for operator in _operators()), refusal


def test_a_list_is_read() -> None:
    [refusal] = parse_refusals(_GOOD, "here")
    assert refusal.covers(torch.ops.aten.add.Tensor)
    assert not refusal.covers(torch.ops.aten.sub.Tensor)


@pytest.mark.parametrize(("old", "new", "said"), [
    ("operators", "operator", "operator"),
    ("'aten::add\\..*'", "'aten::('", "no regular expression"),
    ("'aten::add\\..*'", "''", "operators is empty"),
    ("It is refused for the sake of this test.", "It is.", "reason"),
])
def test_a_bad_list_is_refused_with_its_fault(old: str, new: str, said: str) -> None:
    with pytest.raises(specs.SpecError, match=re.escape(said)):
        parse_refusals(_GOOD.replace(old, new, 1), "here")


def test_a_guard_that_refuses_what_is_not_listed_breaks_the_law(kit: Any) -> None:
    plugin = kit.install_broken("guard")
    outcome = kit.run(f"--djinn-plugin=session:{plugin}", "--djinn-served", "-k",
                      "served_equals_local and (healthy or refuses-views) and view-")
    assert outcome.status == pytest.ExitCode.TESTS_FAILED, outcome.output
    verdicts = {subject: laws["session.served_equals_local"] for subject, laws in outcome.laws.items()}
    assert verdicts == {"healthy": "passed", "refuses-views": "failed"}, outcome.output
    assert "No views here" in outcome.output


