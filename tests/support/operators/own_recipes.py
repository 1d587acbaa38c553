"""Right arguments of djinn's own operators, by name without overload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ("OWN_RECIPES",)

_Recipe = Callable[[], dict[str, Any]]


def _norm() -> dict[str, Any]:
    tensor, rows = torch.rand(2, 3, 4), [torch.rand(3) for _ in range(6)]
    weight, bias, mean, variance, saved_mean, saved_variance = rows
    return {"input": tensor, "weight": weight, "bias": bias, "running_mean": mean, "running_var": variance,
            "mean": mean, "variance": variance, "momentum": 0.1, "eps": 1e-5, "grad_out": torch.rand(2, 3, 4),
            "save_mean": saved_mean, "save_invstd": saved_variance}


def _rms() -> dict[str, Any]:
    return {"input": torch.rand(2, 3, 4), "normalized_shape": [4], "weight": torch.rand(4), "eps": 1e-5,
            "grad_out": torch.rand(2, 3, 4), "rstd": torch.rand(2, 3, 1)}


def _attention(*, with_residuals: bool) -> _Recipe:
    def recipe() -> dict[str, Any]:
        query, key, value = (torch.rand(2, 4, rows, 8) for rows in (5, 6, 6))
        words = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
        made = {"query": query, "key": key, "value": value, **words}
        if not with_residuals:
            return made
        # The executor has defined it.
        attend = torch.ops.djinn.scaled_dot_product_attention_with_residuals
        out, sums, drawn = attend(query, key, value, *words.values())
        return {**made, "grad_out": torch.rand(out.shape), "out": out, "logsumexp": sums, "random": drawn}

    return recipe


def _recurrent(mode: int, gates: int, states: int, *, backward: bool) -> _Recipe:
    def recipe() -> dict[str, Any]:
        states_of = [torch.rand(1, 2, 4) for _ in range(states)]
        return {
            "data": torch.rand(5, 3), "input": torch.rand(5, 2, 3), "batch_sizes": [] if backward else [2, 2, 1],
            "hx": states_of, "params": [torch.rand(4 * gates, 3), torch.rand(4 * gates, 4), torch.rand(4 * gates),
                                        torch.rand(4 * gates)],
            "mode": mode, "has_biases": True, "num_layers": 1, "train": True, "bidirectional": False,
            "batch_first": False, "gradients": [torch.rand(5, 2, 4), *(torch.rand(1, 2, 4) for _ in states_of)]}

    return recipe


_KINDS = ((0, 1, 1), (1, 1, 1), (2, 4, 2), (3, 3, 1))
"""By number: how many gates and states a recurrent network has."""

OWN_RECIPES: Mapping[str, tuple[_Recipe, ...]] = {
    **dict.fromkeys(("batch_norm_training", "batch_norm_inference", "batch_norm_gradients"), (_norm,)),
    **dict.fromkeys(("rms_norm_training", "rms_norm_gradients"), (_rms,)),
    **dict.fromkeys((f"scaled_dot_product_attention{more}" for more in ("", "_kernel", "_with_residuals")),
                    (_attention(with_residuals=False),)),
    "scaled_dot_product_attention_backward": (_attention(with_residuals=True),),
    "recurrent_packed": tuple(_recurrent(*kind, backward=False) for kind in _KINDS),
    "recurrent_backward": tuple(_recurrent(*kind, backward=True) for kind in _KINDS),
    "exchange_random_state": (lambda: {"state": torch.Generator().manual_seed(1).get_state()},
                              lambda: {"state": _after_draws()}),
}


def _after_draws() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    torch.rand(5, generator=generator)
    return generator.get_state()
