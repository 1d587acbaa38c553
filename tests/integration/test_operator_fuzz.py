"""Changed calls of operators keep to their memory, and a hole in the guard is found.

``nox -s chaos -- operators`` calls every overload; here it is some of them, the same each time.
"""

from __future__ import annotations

import random
from pathlib import Path

import operator_fuzzing
import pytest
from operator_fuzzing import Found, Settings, allowed, look, merged, told

pytestmark = [pytest.mark.skipif(bool(operator_fuzzing.obstacle()), reason=operator_fuzzing.obstacle()),
              pytest.mark.timeout(900)]
RISKY = tuple(f"aten::{name}" for name in (
    "native_group_norm", "native_group_norm_backward", "rrelu_with_noise", "rrelu_with_noise_", "_fused_sgd_",
    "_fused_adam_", "adaptive_max_pool3d_backward", "native_batch_norm_backward", "_weight_norm_interface",
    "_weight_norm_interface_backward", "_ctc_loss", "_embedding_bag", "nanmedian.dim", "median.dim",
    "_masked_softmax", "linalg_ldl_solve", "linalg_lstsq", "lcm", "div.Tensor_mode", "log_sigmoid_forward.output",
    "adaptive_avg_pool3d_backward.grad_input", "reflection_pad3d_backward.grad_input", "replication_pad2d.out",
    "adaptive_avg_pool3d.out", "fractional_max_pool2d.output", "rrelu_with_noise.out", "empty.out", "resize_",
    "resize_as_", "as_strided", "_softmax.out", "_scaled_dot_product_flash_attention_for_cpu"))
"""Overloads whose kernels have reached beyond their memory, or that lay out memory."""
SAMPLED = 60
SETTINGS = Settings(target=12, attempts=60, seconds=60, dtypes=1, samples=3, proposals=20, seed=3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return operator_fuzzing.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def found(library: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    names = [*RISKY, *random.Random(1).sample(sorted(set(allowed()) - set(RISKY)), SAMPLED)]
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


@pytest.mark.parametrize(("overload", "hole"), [
    ("aten::native_group_norm", {"trusted": ["native_group_norm"]}),
    ("aten::native_batch_norm", {"taken_out": ["native_batch_norm"]}),
], ids=["strides", "sizes"])
def test_a_hole_is_found(
    library: Path, corpus: Path, tmp_path: Path, overload: str, hole: dict[str, list[str]], found: Found,
) -> None:
    """Operands that are not made dense, and no rule for their sizes."""
    settings = Settings(target=60, attempts=200, seconds=120, dtypes=1, samples=3, proposals=20, seed=3)
    planted = merged([look([overload], settings, library, corpus, tmp_path / "planted.json", **hole)])
    assert planted.findings
    for finding in planted.findings:
        assert finding["overload"] == overload
        assert finding["again"]
