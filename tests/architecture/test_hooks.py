"""Every hook is documented in the house's form, and every kind of plugin has its hook, Protocol and laws."""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from djinn import hookspecs
from djinn.plugins import KINDS

ROOT = Path(__file__).parents[2]
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("djinn_")}
KIND_OF = {f"djinn_register_{kind if kind.endswith(('s', 'y')) else f'{kind}s'}": kind for kind in KINDS}
OTHERS = [name for name in HOOKS if name not in KIND_OF]


def sections(hook: Callable[..., Any]) -> dict[str, str]:
    """Sections of a Google-style docstring, by title."""
    text = inspect.getdoc(hook) or ""
    parts = re.split(r"^([A-Z][a-z]+):$", text, flags=re.MULTILINE)
    bodies = map(textwrap.dedent, parts[2::2])
    return {"": parts[0].strip(), **{title: body.strip() for title, body in zip(parts[1::2], bodies, strict=True)}}


@pytest.mark.parametrize("name", OTHERS)
def test_a_hook_says_when_it_is_called_and_what_may_go_wrong(name: str) -> None:
    found = sections(HOOKS[name])
    assert found["Called"].startswith("Phase *")
    assert re.match(r"\w+Error: |Exception: ", found["Raises"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["Since"])


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_what_it_is_and_what_it_is_given(name: str) -> None:
    found = sections(HOOKS[name])
    summary = found[""].splitlines()[0]
    assert re.fullmatch(r"[A-Z].*[^.]\.", summary), summary
    for argument in inspect.signature(HOOKS[name]).parameters:
        assert re.search(rf"^ *{argument}: \S", found["Args"], re.MULTILINE), f"{name} does not describe {argument}"


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_typed_and_known_to_pluggy(name: str) -> None:
    signature = inspect.signature(HOOKS[name])
    assert (signature.return_annotation == "None") is ("Returns" not in sections(HOOKS[name]))
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
    assert hasattr(HOOKS[name], f"{hookspecs.GROUP}_spec")


@pytest.mark.parametrize("name", KIND_OF)
def test_the_hook_of_a_kind_names_the_protocol_and_repeats_nothing_common(name: str) -> None:
    found = sections(HOOKS[name])
    module, _, protocol = KINDS[KIND_OF[name]].protocol.partition(":")
    assert found["Args"].startswith(f"register: Accepts a `{module}.{protocol}`.")
    assert set(found) <= {"", "Called", "Args"}


def test_what_the_hooks_of_kinds_have_in_common_is_said_once() -> None:
    common = (hookspecs.__doc__ or "").partition("in common")[2]
    for said in ("phase *register*", "`PluginValidationError`", "``specs/kinds/KIND.toml``", "since 0.1.0"):
        assert said in common


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_laws(kind: str) -> None:
    spec = tomllib.loads((ROOT / "specs" / "kinds" / f"{kind}.toml").read_text())
    assert spec["kind"] == kind
    assert spec["laws"]


def test_every_registration_hook_belongs_to_a_kind() -> None:
    others = {"djinn_register_commands", "djinn_register_workloads"}
    assert {name for name in HOOKS if name.startswith("djinn_register_")} == set(KIND_OF) | others


def test_every_spec_of_a_kind_belongs_to_a_kind() -> None:
    assert {path.stem for path in (ROOT / "specs" / "kinds").glob("*.toml")} == set(KINDS)
