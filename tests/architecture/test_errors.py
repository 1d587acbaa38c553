"""Classes, specs/errors.toml and docs/errors.md say the same."""

from __future__ import annotations

import inspect
import pickle
import re
import tomllib
from pathlib import Path

import pytest

import djinn
from djinn import errors
from djinn.errors import DjinnError

ROOT = Path(__file__).parents[2]
CLASSES = {
    name: value for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, DjinnError) and value is not DjinnError
}
SPECS = {entry["name"]: entry for entry in tomllib.loads((ROOT / "specs" / "errors.toml").read_text())["errors"]}


def documented() -> dict[str, tuple[str, str, str]]:
    """From docs/errors.md: code, cause and remedy by class."""
    parts = re.split(r"^### (DJ\d{3}) (\w+)$", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for code, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        text = " ".join(re.sub(r"^## .*$", "", body, flags=re.MULTILINE).split())
        match = re.fullmatch(r"\*\*Cause\.\*\* (.+?) \*\*Remedy\.\*\* (.+)", text)
        assert match is not None, f"{name} lacks a cause or a remedy"
        found[name] = (code, match[1], match[2])
    return found


def test_every_class_is_specified_and_documented_and_nothing_else_is() -> None:
    assert set(CLASSES) == set(SPECS) == set(documented())
    assert set(errors.__all__) == {*CLASSES, "DjinnError"}


def test_codes_are_unique_and_of_one_form() -> None:
    codes = [kind.__dict__.get("code") for kind in CLASSES.values()]
    assert all(re.fullmatch(r"DJ[1-9]\d\d", code) for code in codes if code)
    assert None not in codes, "an error shares the code of its base"
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_the_spec_and_the_page_agree(name: str) -> None:
    spec = SPECS[name]
    assert spec["code"] == CLASSES[name].code
    assert documented()[name] == (spec["code"], " ".join(spec["cause"].split()), " ".join(spec["remedy"].split()))
    assert (CLASSES[name].__doc__ or "").strip()


@pytest.mark.parametrize("name", CLASSES)
def test_an_error_says_code_what_and_remedy_and_survives_a_process_boundary(name: str) -> None:
    error = CLASSES[name]("It broke.", hint="Mend it.")
    assert str(error) == f"[{error.code}] It broke. Mend it."
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.summary, again.hint) == (type(error), "It broke.", "Mend it.")


def test_what_users_catch_is_at_the_top() -> None:
    for name in ("DjinnError", "TransportError"):
        assert getattr(djinn, name) is getattr(errors, name)
