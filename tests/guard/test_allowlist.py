"""Every operator of the installed PyTorch is allowed or refused on purpose."""

from __future__ import annotations

from functools import cache
from importlib import resources

import pytest
import torch
from support.operators import allowlist

from djinn.errors import UnknownOperatorError
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard import allowlist as guard_lists
from djinn_plugins.guard.allowlist import (
    ALLOWED,
    INTERNAL,
    UNREVIEWED,
    classified,
    lists,
    reasons,
    release,
    require_allowed,
    written,
)

groups = cache(classified)
"""Of all overloads, which take a second to go through."""


def test_the_installed_release_was_reviewed() -> None:
    assert release() in lists()
    changed = allowlist.differences()
    assert not changed, "\n".join([
        f"PyTorch {release()} has other overloads than those reviewed, or the rules have changed:", *changed,
        "Review them, amend plugins/djinn_plugins/guard/rules.toml, and run",
        "python tests/support/operators/allowlist.py --accept"])


def test_every_group_has_a_reason_and_members() -> None:
    found = set(groups().values())
    assert found - {ALLOWED} == set(reasons()) - {UNREVIEWED}
    assert all(reason.endswith(".") for reason in reasons().values())


@pytest.mark.parametrize("name", [
    "aten::from_file", "aten::set_.source_Storage", "aten::record_stream", "aten::_cufft_clear_plan_cache",
    "aten::fbgemm_pack_gemm_matrix_fp16", "aten::_index_put_impl_", "aten::_sparse_coo_tensor_unsafe",
    "aten::_copy_from", "aten::set_data", "aten::_foobar", "aten::zeros_like.out"])
def test_what_is_dangerous_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnknownOperatorError, match=name) as caught:
        require_allowed(operator_named(name), frozenset())
    assert reasons()[groups()[name]] in str(caught.value)


def test_what_pytorch_offers_by_a_public_name_is_not_refused_as_internal() -> None:
    offered = {name for module in (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)
               for name in dir(module) if not name.startswith("_")}
    # Functions in Python that call one operator, whose name differs.
    offered |= {"_scaled_mm_v2", "_scaled_grouped_mm_v2", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
                "_fused_moving_avg_obs_fq_helper"}
    assert [name for name, group in groups().items() if group in (INTERNAL, "unchecked")
            and name.removeprefix("aten::").partition(".")[0] in offered] == ["aten::_scaled_grouped_mm_v2"]


def test_other_namespaces_are_let_in_by_name() -> None:
    operator = torch.ops.prims.neg.default
    with pytest.raises(UnknownOperatorError, match="--allow-namespace prims"):
        require_allowed(operator, frozenset())
    require_allowed(operator, frozenset({"prims"}))


def test_the_lists_are_read_as_they_are_written() -> None:
    text = (resources.files("djinn_plugins.guard") / "overloads.txt").read_text(encoding="utf-8")
    assert written(lists()) == text
    assert list(lists()) == text.splitlines()[0].split()
    assert "aten::qr" in lists()["2.13.0"]
    assert "aten::qr" not in lists()["2.15.0"]
    assert lists()["2.12.1"]["aten::softmax.Dimname"] == "objects"
    assert lists()["2.15.0"]["aten::shallow_copy_data_"] == "process"


def test_a_release_of_which_no_list_exists_runs_what_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = lists()
    monkeypatch.setattr(guard_lists, "release", lambda: "2.99.0")
    monkeypatch.setattr(guard_lists, "lists", lambda: {"2.12.1": {
        name: group for name, group in known["2.13.0"].items() if name != "aten::qr"}})
    guard_lists.group_of.cache_clear()
    try:
        require_allowed(operator_named("aten::add.Tensor"), frozenset())
        with pytest.raises(UnknownOperatorError, match="no reviewed one"):
            require_allowed(operator_named("aten::qr"), frozenset())
    finally:
        guard_lists.group_of.cache_clear()
