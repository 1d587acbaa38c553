"""The specifications: they load, they say what they must, and the code names the same laws."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import djinn.hookspecs
import djinn.kinds
from djinn.plugins import KINDS
from djinn_conformance import specs
from djinn_conformance.capabilities import FOUND_OUT

_LAWS = re.compile(r"^ *Laws:\n((?: +[a-z_., ]+\n)+)", re.MULTILINE)
_GOOD = """
kind = "shapes"
protocol = "djinn.kinds.shapes.ShapeInference"
summary = "Infers."
[capabilities]
quick = "Declared."
[[laws]]
id = "shapes.something"
statement = "Something holds."
source = "somewhere"
requires = ["quick"]
"""


def _named_in(module: Any) -> set[str]:
    blocks = _LAWS.findall(inspect.getsource(module))
    return {name for block in blocks for name in re.findall(r"[a-z]+\.[a-z_]+", block)}


def test_every_kind_has_laws() -> None:
    assert sorted(specs.kinds()) == sorted(KINDS)


@pytest.mark.parametrize("kind", specs.kinds())
def test_docstrings_and_specifications_name_the_same_laws(kind: str) -> None:
    spec = specs.kind_spec(kind)
    name, _, protocol = spec.protocol.rpartition(".")
    module = importlib.import_module(name)
    # The serving half of a contract is in the library.
    served = f"djinn_plugins.common.kinds.{kind}"
    modules = [module, *([importlib.import_module(served)] if importlib.util.find_spec(served) else [])]
    named = {law for each in modules for law in _named_in(each)}
    assert {law for law in named if law.startswith(f"{kind}.")} == {law.id for law in spec.laws}
    public, _, public_name = KINDS[kind].protocol.partition(":")
    assert getattr(module, protocol) is getattr(importlib.import_module(public), public_name)


@pytest.mark.parametrize("kind", specs.suites())
def test_sources_of_this_repository_exist(kind: str) -> None:
    root = Path(djinn.hookspecs.__file__).parents[1]
    for law in specs.kind_spec(kind).laws:
        for path in re.findall(r"\b(?:djinn|plugins|conformance|docs|specs)/[\w/]+\.\w+\b", law.source):
            assert (root / path).is_file(), f"{law.id} comes from {path}, which does not exist"


def test_capabilities_that_are_found_out_are_described() -> None:
    described = {f"{kind}.{name}" for kind in specs.suites() for name in specs.kind_spec(kind).capabilities}
    assert set(FOUND_OUT) <= described


def test_a_good_specification_is_read() -> None:
    spec = specs.parse_kind(_GOOD, "here")
    assert [law.requires for law in spec.laws] == [("quick",)]


@pytest.mark.parametrize(("old", "new", "said"), [
    ("statement", "statment", "statment"),
    ('"shapes.something"', '"executor.something"', "executor.something is no law of shapes"),
    ('"shapes.something"', '"something"', "kind.name_of_law"),
    ("Something holds.", "Something holds", "not one sentence"),
    ("Something holds.", "Something holds. And more.", "not one sentence"),
    ('"somewhere"', '" "', "source is empty"),
    ('["quick"]', '["slow"]', "slow"),
    ('["quick"]', '"quick', "here:"),
    ("[[laws]]", '[[laws]]\nid = "shapes.something"\nstatement = "A."\nsource = "b"\n[[laws]]', "twice"),
])
def test_a_bad_specification_is_refused_with_its_fault(old: str, new: str, said: str) -> None:
    with pytest.raises(specs.SpecError, match=re.escape(said)) as caught:
        specs.parse_kind(_GOOD.replace(old, new, 1), "here")
    assert str(caught.value).startswith("here: ")


def test_an_unknown_law_and_kind_are_named() -> None:
    with pytest.raises(specs.SpecError, match="no_such_law"):
        specs.law_named("shapes.no_such_law")
    with pytest.raises(specs.SpecError, match="weather"):
        specs.law_named("weather.fine")
