"""Cases of training are judged as their expectations say, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch

from djinn_conformance import tally, training
from djinn_conformance.journal import EventLog
from djinn_conformance.training import Case, TrainingExpectation, check_all, training_spec

REMOTE = torch.device("remote_accelerator:0")
CPU = torch.device("cpu")


def _case(sample: str, factor: float = 1.0, *, raising: type[Exception] | None = None) -> Case:
    """A case whose remote side is off by a factor, or raises."""

    def procedure(journal: EventLog) -> None:
        is_remote = journal.device.type == REMOTE.type
        if is_remote and raising is not None:
            raise raising
        value = torch.arange(1.0, 4.0).to(journal.device)
        journal.note("value", {"a": [value * factor if is_remote else value]})

    return Case("modules", "Made", "train", "float32", "steps", sample, procedure)


def _judged(monkeypatch: pytest.MonkeyPatch, *cases: Case, thorough: bool = False, **expected: str) -> str:
    """Return the complaint, or nothing."""
    made = (TrainingExpectation(f"modules/Made/*/{sample}", status, "tested", "here")
            for sample, status in expected.items())
    spec = attrs.evolve(training_spec(), expectations=tuple(made))
    monkeypatch.setattr(training, "training_spec", lambda: spec)
    try:
        check_all("modules", cases, CPU, REMOTE, session="in process", thorough=thorough)
    except AssertionError as error:
        return str(error)
    return ""


def test_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _judged(monkeypatch, _case("a"))


def test_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "value['a'][0]" in _judged(monkeypatch, _case("a"), _case("b", 1.5))
    assert "KeyError" in _judged(monkeypatch, _case("b", raising=KeyError))


def test_expected_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _judged(monkeypatch, _case("a", 1.5), thorough=True, a="differs")
    assert not _judged(monkeypatch, _case("a", raising=KeyError), a="refused")
    assert not _judged(monkeypatch, _case("a", 1 + 1e-6), _case("a"), thorough=True, a="rounds")


def test_difference_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "status is refused" in _judged(monkeypatch, _case("a", 1.5), a="refused")
    assert "status is differs" in _judged(monkeypatch, _case("a", raising=KeyError), a="differs")
    assert "value['a'][0]" in _judged(monkeypatch, _case("a", 1.01), a="rounds")


@pytest.mark.parametrize("status", ["differs", "refused"])
def test_unexpected_pass(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    assert "is equal, although" in _judged(monkeypatch, _case("a"), a=status)


def test_expectation_that_nothing_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nothing differs any more" in _judged(monkeypatch, _case("a"), thorough=True, a="rounds")


def test_tensor_on_the_wrong_side(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attrs.evolve(_case("a"), procedure=lambda journal: journal.note("value", torch.ones(2)))
    assert "metadata of value" in _judged(monkeypatch, case)


def test_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    tally.record_to(str(path))
    try:
        _judged(monkeypatch, _case("a"), _case("a"), _case("b", 1.5), _case("c", 1.5), b="differs")
    finally:
        tally.record_to(None)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{
        "suite": "modules", "name": "Made", "variant": "train", "dtype": "float32", "direction": "steps",
        "session": "in process", "equal": 2, "different": 1, "total": 4}]
