"""Families of transformers' models give on a guarded server what local PyTorch gives, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.models.model_families import FAMILIES, Family, outcome_of

import djinn

pytestmark = [pytest.mark.usefixtures("on_a_server"), pytest.mark.filterwarnings("ignore")]
_LEAST_FAMILIES = 40


def test_there_are_enough_families() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= _LEAST_FAMILIES


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_forward_generate_and_training_equal_eager(family: Family) -> None:
    pytest.importorskip("transformers")
    model = family.model()
    wanted = outcome_of(family, model, "cpu")
    got = outcome_of(family, model, "remote_accelerator:0")
    assert djinn.is_initialized()
    assert list(got) == list(wanted)
    different = [name for name, value in zip(got, djinn.materialize(*got.values()), strict=True)
                 if not torch.equal(value, wanted[name])]
    assert not different
