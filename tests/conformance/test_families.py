"""The loader of the operator families refuses what it does not understand, and says what and where."""

from __future__ import annotations

import pytest

from djinn_conformance.families import (
    domains,
    expected_differences,
    families,
    parse_domains,
    parse_expected,
    parse_family,
)
from djinn_conformance.forms import ListWord, LiteralWord, TensorWord, parse_form
from djinn_conformance.specs import SpecError, folder

FAMILY = """
family = "sums"
summary = "Sums."
laws = ["session.operations_equal", "session.variants_equal"]
dtypes = ["float"]

[operators]
{}
"""
EXPECTED = """
[[expected]]
law = "session.operations_equal"
operator = "aten::add.Tensor"
status = "differs"
reason = "A reason of more than twenty characters."
link = "aten/src/x.cpp"
"""


def _refusal(operators: str, before: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        parse_family(before + FAMILY.format(operators), "sums.toml", domains())
    assert str(caught.value).startswith("sums.toml: ")
    return str(caught.value)


def test_every_family_is_read_and_lists_operators() -> None:
    assert sum(len(family.operators) for family in families()) > 600
    assert all(family.operators and family.summary for family in families())


def test_a_well_formed_family_is_read() -> None:
    [spec] = parse_family(FAMILY.format('"add.Tensor" = "tensor other~ alpha=whole"'), "sums.toml", domains()).operators
    assert repr(spec) == "aten::add.Tensor"
    assert [name for name, _ in spec.keywords] == ["alpha"]


@pytest.mark.parametrize(
    ("operators", "named"),
    [
        ('"add.Tensor" = "tensor othr~"', "othr"),
        ('"add.Tensor" = "tensor:smal"', "smal"),
        ('"add.Tensor" = "tensor[3]:below"', "bound"),
        ('"add.Tensor" = "tensor 1.x"', "1.x"),
        ('cat = "( tensor"', "bracket"),
        ('"add.Tensor" = "tensor other~ alpha=whole other"', "position"),
        ('"add.Tensor" = "tensor other~ alfa=whole"', "alfa"),
        ('"add.Tensor" = "tensor"', "lacks other"),
        ('"add.Nothing" = "tensor"', "add.Nothing"),
        ('no_such_operator = "tensor"', "no_such_operator"),
        ('"add.Tensor" = { form = "tensor", dtypes = ["flaot"] }', "flaot"),
        ('"add.Tensor" = { form = "tensor", layouts = ["diagonal"] }', "diagonal"),
        ('"add.Tensor" = { form = "tensor", values = "tiny" }', "tiny"),
        ('"add.Tensor" = { form = "tensor", destinations = ["elsewhere"] }', "elsewhere"),
        ('"add.Tensor" = { form = "tensor", withot = {} }', "withot"),
        ('"add.Tensor" = { form = "tensor", without = { "session.slices_equal" = "Why." } }', "session.slices_equal"),
        ('"add.Tensor" = { form = "tensor", without = { "session.operations_equal" = " " } }', "reason"),
        ('"add.Tensor" = { dtypes = ["float"] }', "form"),
        ('"add.Tensor" = { form = "tensor", tolerance = [{ dtypes = [], relative = 1, absolute = 1, reason = "" }] }',
         "reason"),
    ],
)
def test_what_a_family_gets_wrong_is_named(operators: str, named: str) -> None:
    assert named in _refusal(operators)


def test_every_fault_of_a_family_is_named_at_once() -> None:
    message = _refusal('"add.Tensor" = "tensor othr"\n"sub.Tensor" = "tensor anothr"')
    assert "add.Tensor: 'othr'" in message
    assert "sub.Tensor: 'anothr'" in message


def test_an_unknown_key_of_a_family_is_named() -> None:
    assert "colour" in _refusal('"add.Tensor" = "tensor"', 'colour = "red"\n')


def test_an_unknown_law_of_a_family_is_named() -> None:
    text = FAMILY.format('"add.Tensor" = "tensor"').replace("session.operations_equal", "session.operations_fine")
    with pytest.raises(SpecError, match="operations_fine"):
        parse_family(text, "sums.toml", domains())


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("extents =", "extent =", "extent"),
        ('float = ["float32"', 'float = ["flaot32"', "flaot32"),
        ("small = { low = -2.0", "small = { low = 3.0", "multiples"),
        ('values = "whole" }', 'values = "hole" }', "hole"),
        ('kind = "permutation"', 'kind = "shuffle"', "shuffle"),
    ],
)
def test_what_the_domains_get_wrong_is_named(old: str, new: str, named: str) -> None:
    text = (folder() / "ops" / "domains.toml").read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(SpecError, match=named):
        parse_domains(text.replace(old, new), "domains.toml")


def test_text_that_is_no_toml_is_refused() -> None:
    with pytest.raises(SpecError, match=r"sums\.toml"):
        parse_family("family =", "sums.toml", domains())


def test_expectations_are_read() -> None:
    [entry] = parse_expected(EXPECTED, "here")
    assert entry.status == "differs"
    assert all(entry.reason and entry.link for entry in expected_differences())


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("aten::add.Tensor", "aten::nothing", "aten::nothing"),
        ("session.operations_equal", "session.operations_fine", "operations_fine"),
        ("A reason of more than twenty characters.", "Because.", "reason"),
        ("aten/src/x.cpp", "", "link"),
        ("differs", "is odd", "is odd"),
        ("status", "state", "state"),
    ],
)
def test_what_an_expectation_gets_wrong_is_named(old: str, new: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        parse_expected(EXPECTED.replace(old, new), "here")


def test_a_form_is_taken_apart() -> None:
    positional, keywords = parse_form("?tensor[2,N]:below(5)+ ( mask[*] 3 ) out=[1,2]", domains())
    tensor, several = positional
    assert isinstance(tensor, TensorWord)
    assert (tensor.size, tensor.values, tensor.bound, tensor.many, tensor.optional) == (
        ("2", "N"), "below", "5", True, True)
    assert isinstance(several, ListWord)
    assert several.words[1] == LiteralWord(3)
    assert keywords == (("out", LiteralWord([1, 2])),)
