"""Changed calls of operators keep to their memory, and a hole in the guard is found.

``nox -s chaos -- operators`` calls every overload; here it is some of them, the same each time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import pytest
from support.operators import fuzzer
from support.operators.fuzzer import Found, Settings, allowed, look, merged, told
from support.operators.layouts import STRIDES

pytestmark = [pytest.mark.skipif(bool(fuzzer.obstacle()), reason=fuzzer.obstacle()),
              pytest.mark.timeout(900)]
RISKY = tuple(f"aten::{name}" for name in (
    "native_group_norm", "native_group_norm_backward", "rrelu_with_noise", "rrelu_with_noise_", "_fused_sgd_",
    "_fused_adam_", "adaptive_max_pool3d_backward", "native_batch_norm_backward", "_weight_norm_interface",
    "_weight_norm_interface_backward", "_ctc_loss", "_embedding_bag", "nanmedian.dim", "median.dim",
    "_masked_softmax", "linalg_ldl_solve", "linalg_lstsq", "lcm", "div.Tensor_mode", "log_sigmoid_forward.output",
    "adaptive_avg_pool3d_backward.grad_input", "reflection_pad3d_backward.grad_input", "replication_pad2d.out",
    "adaptive_avg_pool3d.out", "fractional_max_pool2d.output", "rrelu_with_noise.out", "empty.out", "resize_",
    "resize_as_", "as_strided", "_softmax.out", "_scaled_dot_product_flash_attention_for_cpu",
    "_fused_moving_avg_obs_fq_helper", "_scaled_mm_v2"))
"""Overloads whose kernels have reached beyond their memory, or that lay out memory."""
SAMPLED = 60
"""Others; the same ones as long as they are allowed, whatever else is."""
HOLES = {
    "native_group_norm": frozenset(STRIDES),
    "native_batch_norm": frozenset(("empty", "resized", "rank")),
    "adaptive_max_pool2d_backward": frozenset(("wild",)),
}
"""What has to be changed for a planted hole to be found: strides, sizes, indices."""
SETTINGS = Settings(target=12, attempts=60, seconds=60, dtypes=1, samples=3, proposals=20, seed=3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzzer.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def found(library: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    others = sorted(set(allowed()) - set(RISKY), key=lambda name: hashlib.blake2b(name.encode()).digest())
    names = [*RISKY, *others[:SAMPLED]]
    return merged([look(names, SETTINGS, library, corpus, tmp_path_factory.mktemp("found") / "found.json")])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus") / "corpus"


def test_kernels_keep_to_their_memory(found: Found) -> None:
    assert list(map(told, found.findings)) == []
    ran = [found.ran(name) for name in found.overloads]
    assert sum(count >= SETTINGS.target for count in ran) > 0.8 * len(ran)
    assert found.total("refused") > 50
    assert found.total("raised") > 50


@pytest.fixture(scope="module")
def planted(library: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory, found: Found) -> Found:
    """Look behind a guard that trusts one kernel, has no rule for another, and believes the indices of a third."""
    settings = attrs.evolve(SETTINGS, target=60, attempts=200)
    result = tmp_path_factory.mktemp("planted") / "found.json"
    return merged([look([f"aten::{name}" for name in HOLES], settings, library, corpus, result,
                        trusted=["native_group_norm"], taken_out=["native_batch_norm"],
                        unranged=["adaptive_max_pool2d_backward"])])


@pytest.mark.parametrize("name", list(HOLES))
def test_a_hole_is_found(name: str, planted: Found) -> None:
    findings = [finding for finding in planted.findings if finding["overload"] == f"aten::{name}"]
    assert findings
    for finding in findings:
        assert finding["again"]
        assert HOLES[name].issuperset(finding["changed"])
