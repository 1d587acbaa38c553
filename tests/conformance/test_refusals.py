"""The list of what a guarded server refuses, held against the guard; and a guard that refuses what is not listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.errors import UnknownOperatorError
from djinn_conformance import specs
from djinn_conformance.families import families
from djinn_conformance.program_forms import Drawer, Form, table
from djinn_conformance.programs import RecordedCall, Ref, call
from djinn_conformance.refusals import is_listed, is_listed_call, overlaps_itself, parse_refusals, refusals
from djinn_conformance.variants import variants_of
from djinn_plugins.guard.allowlist import require_allowed
from djinn_plugins.guard.calls import check_of

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


_ROWS = torch.arange(3)
_WRITES = [
    call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0),
    call("aten::masked_fill_.Scalar", Ref(-1), Ref(-3), 2, results=0),
    call("aten::index_put_", Ref(-1), [Ref(-4)], Ref(-2), results=0),
    call("aten::cumsum_", Ref(-1), 0, results=0),
    call("aten::neg.out", Ref(-2), out=Ref(-1), results=0),
    call("aten::native_batch_norm", Ref(-5), None, None, Ref(-1), Ref(-2), True, 0.1, 1e-5, results=3),
    call("aten::_foreach_zero_", [Ref(-1)], results=0),
]


def _values(written: torch.Tensor) -> dict[int, torch.Tensor]:
    return {-1: written, -2: torch.ones(3), -3: torch.ones(3, dtype=torch.bool), -4: _ROWS, -5: torch.randn(2, 3, 4)}


def _is_refused_now(made: RecordedCall, values: dict[int, torch.Tensor]) -> bool:
    def filled(item: Any) -> Any:
        return [filled(member) for member in item] if isinstance(item, list) else (
            values[item.index] if isinstance(item, Ref) else item)

    check = check_of(made.operator, 0)
    try:
        if check is not None:
            check([filled(item) for item in made.args], {name: filled(item) for name, item in made.kwargs.items()})
    except RuntimeError as error:
        return "single memory location" in str(error)
    return False


@pytest.mark.parametrize("made", _WRITES, ids=lambda made: made.operator.name())
@pytest.mark.parametrize(("written", "overlaps"), [
    (torch.zeros(1).expand(3), True), (torch.zeros(3), False), (torch.zeros(6)[::2], False),
], ids=["expanded", "contiguous", "strided"])
def test_writes_into_overlapping_tensors_are_listed_and_refused(
    made: RecordedCall, written: torch.Tensor, overlaps: bool
) -> None:
    values = _values(written)
    assert overlaps_itself(written) is overlaps
    assert is_listed_call(made, values) is overlaps
    assert _is_refused_now(made, values) is overlaps


def test_what_only_reads_an_overlapping_tensor_is_not_listed() -> None:
    values = _values(torch.zeros(1).expand(3))
    assert not is_listed_call(call("aten::add.Tensor", Ref(-1), Ref(-2)), values)
    assert not is_listed_call(call("aten::add_.Tensor", Ref(-2), Ref(-1), results=0), values)


def test_an_operator_that_reads_what_it_writes_is_listed() -> None:
    values = _values(torch.zeros(3))
    assert is_listed_call(call("aten::rrelu_with_noise", Ref(-1), Ref(-1), 0.1, 0.2, True), values)
    assert not is_listed_call(call("aten::rrelu_with_noise", Ref(-1), Ref(-2), 0.1, 0.2, True), values)


def _forms(group: str) -> list[Form]:
    return [form for form in table().groups[group] if "{x}" in form.text]


@settings(max_examples=10, derandomize=True, database=None)
@given(data=st.data())
def test_random_programs_on_servers_write_nothing_that_overlaps_itself(data: st.DataObject) -> None:
    values = {"t1": torch.zeros(1).expand(3)}
    drawer = Drawer(data.draw, values, keeps_apart=True)
    for form in _forms("write"):
        assert "t1.clone()" in drawer.fill(form), form.text
    values["t2"] = torch.zeros(3)
    drawer.values = values
    assert all("t1" not in drawer.fill(form) for form in _forms("write"))
    del values["t2"]
    assert all("clone" not in drawer.fill(form) for form in _forms("compute"))


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
    outcome = kit.run(f"--djinn-plugin=session:{plugin}", "-k",
                      "served_equals_local and (healthy or refuses-views) and view-")
    assert outcome.status == pytest.ExitCode.TESTS_FAILED, outcome.output
    verdicts = {subject: laws["session.served_equals_local"] for subject, laws in outcome.laws.items()}
    assert verdicts == {"healthy": "passed", "refuses-views": "failed"}, outcome.output
    assert "No views here" in outcome.output


