"""Changed calls of operators keep to their memory, and holes in the guard are found.

``nox -s chaos -- operators`` calls every overload; here it is some of them, the same each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
from support.operators import fuzzer
from support.operators.fuzzer import Settings, allowed, look, merged, own, told
from support.operators.planted import HOLES

pytestmark = [pytest.mark.skipif(bool(fuzzer.obstacle()), reason=fuzzer.obstacle()),
              pytest.mark.timeout(900)]
RISKY = tuple(f"aten::{name}" for name in (
    "native_group_norm_backward", "rrelu_with_noise", "rrelu_with_noise_", "_fused_sgd_",
    "_fused_adam_", "native_batch_norm", "native_batch_norm_backward", "_weight_norm_interface",
    "_weight_norm_interface_backward", "_ctc_loss", "_embedding_bag", "nanmedian.dim", "median.dim",
    "_masked_softmax", "linalg_ldl_solve", "linalg_lstsq", "lcm", "div.Tensor_mode", "log_sigmoid_forward.output",
    "adaptive_avg_pool3d_backward.grad_input", "reflection_pad3d_backward.grad_input", "replication_pad2d.out",
    "adaptive_avg_pool3d.out", "fractional_max_pool2d.output", "rrelu_with_noise.out", "empty.out", "resize_",
    "resize_as_", "as_strided", "_softmax.out", "_scaled_dot_product_flash_attention_for_cpu",
    "_fused_moving_avg_obs_fq_helper", "_scaled_mm_v2", "_foreach_powsum.Scalar", "gather_backward"))
"""Overloads whose kernels have reached beyond their memory, or that lay out memory."""
SAMPLED = 16
"""Others; the same ones as long as they are allowed, whatever else is."""
SETTINGS = Settings(target=14, attempts=50, seconds=60, dtypes=1, samples=2, proposals=20, seed=3)
STOOD_IN = [hole.overload for hole in HOLES.values()]
BEHIND = {"overloads": STOOD_IN, "target": 1200, "attempts": 3600, "crashes": 4}
"""What is done behind a guard that has forgotten its rules."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Call some overloads behind the guard. Kernels that are stood in for misbehave; their rules are forgotten then."""
    left = sorted({*allowed(), *own()}.difference(RISKY, STOOD_IN),
                  key=lambda name: hashlib.blake2b(name.encode()).digest())
    folder = tmp_path_factory.mktemp("fuzz")
    return look([*RISKY, *STOOD_IN, *left[:SAMPLED]], SETTINGS, fuzzer.build(folder), folder / "corpus",
                folder / "found.json", list(HOLES), BEHIND)


def test_kernels_keep_to_their_memory(results: Mapping[str, Any]) -> None:
    found = merged([results])
    assert list(map(told, found.findings)) == []
    ran = [found.ran(name) for name in found.overloads]
    assert sum(count >= SETTINGS.target for count in ran) > 0.8 * len(ran)
    assert found.total("refused") > 50
    assert found.total("raised") > 50


@pytest.mark.parametrize("kind", list(HOLES))
def test_a_hole_is_found(kind: str, results: Mapping[str, Any]) -> None:
    hole = HOLES[kind]
    findings = [finding for finding in results["behind"]["findings"] if finding["overload"] == hole.overload]
    assert all(hole.words in finding["kind"] for finding in findings)
    assert any(finding["again"] and hole.changed.intersection(finding["changed"]) for finding in findings)
