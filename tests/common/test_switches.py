"""PyTorch's process-wide switches: read, sent, set and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from djinn.errors import ProtocolError
from djinn_plugins.common.calls.switches import SWITCHES, check_switches, switched, switches

VALUES = [(name, word) for name, switch in SWITCHES.items() if switch.is_here for word in switch.words.values()]


@pytest.mark.parametrize(("name", "word"), VALUES)
def test_a_switch_holds_within_a_block_and_is_put_back(name: str, word: str) -> None:
    before = switches()
    check_switches(((name, word),))
    # Where the processor or the build does not have it, setting it fails.
    with contextlib.suppress(RuntimeError), switched(((name, word),)):
        assert dict(switches()).get(name, word) == word
        assert torch.ones(2).sum() == 2
    assert switches() == before


def test_the_older_interface_to_precisions_is_put_back_with_what_it_sets_besides() -> None:
    with switched((("fp32_precision_mkldnn_matmul", "bf16"),)):
        inside = switches()
        with switched((("float32_matmul_precision", "high"), ("fp32_precision_cuda_matmul", "tf32"),
                       ("fp32_precision_mkldnn_matmul", "tf32"))):
            assert torch.get_float32_matmul_precision() == "high"
        assert switches() == inside
    assert switches() == ()


@pytest.fixture
def unnamed() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for name in ("cuda_matmul", "mkldnn_matmul", "generic_all"):
        SWITCHES[f"fp32_precision_{name}"].set("none")


@pytest.mark.usefixtures("unnamed")
def test_the_way_back_to_the_default_precision_leaves_no_switch() -> None:
    torch.set_float32_matmul_precision("high")
    assert dict(switches())["float32_matmul_precision"] == "high"
    torch.set_float32_matmul_precision("highest")
    assert switches() == ()
    with switched((("mkldnn_enabled", "off"),)):
        assert switches() == (("mkldnn_enabled", "off"),)
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("unnamed")
def test_a_full_precision_below_a_reduced_one_is_a_switch() -> None:
    # As `torch.backends.fp32_precision = "tf32"`, which PyTorch's own tests forbid in their processes.
    SWITCHES["fp32_precision_generic_all"].set("tf32")
    SWITCHES["fp32_precision_mkldnn_matmul"].set("ieee")
    inside = dict(switches())
    assert (inside["fp32_precision_mkldnn_matmul"], inside["fp32_precision_mkldnn_conv"]) == ("ieee", "tf32")


@pytest.mark.parametrize("given", [
    (("nothing", "on"),), (("mkldnn_enabled", "True"),), (("mkldnn_enabled", "off"),) * 2, (("", ""),),
])
def test_what_is_no_switch_is_refused(given: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ProtocolError):
        check_switches(given)
