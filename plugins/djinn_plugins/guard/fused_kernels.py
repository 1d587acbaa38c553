"""Conditions for kernels that execute a whole layer, or a whole optimizer step, at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from djinn_plugins.common.operators.attention import dtype_of_sums, padded_rows
from djinn_plugins.common.operators.norms import dtype_of_rms, size_of_rms
from djinn_plugins.guard.preconditions import Named, expect, numel_is, same_size, size_is

__all__ = ("Rule", "attention", "attention_backward", "attention_residuals", "attention_with_residuals",
           "encoder_layer", "fused_optimizer", "multi_head_attention", "packed_network", "recurrent",
           "recurrent_backward", "recurrent_network", "recurrent_network_backward", "whole_attention",
           "whole_batch_norm", "whole_rms_norm")

Rule: TypeAlias = Callable[[Named], None]
"""Raises the error that the kernel should raise."""


def attention(named: Named) -> None:
    """Check that queries, keys, values and mask fit; several query heads may share one head of key and value."""
    query, key, value = named["query"], named["key"], named["value"]
    expect(query.dim() == key.dim() == value.dim() == 4, "query, key and value have not 4 dimensions")
    expect(key.shape[:2] == value.shape[:2], "key and value of other batches or heads")
    expect(query.shape[0] == key.shape[0], "query, key and value of other batches")
    # The kernel divides the number of heads by that of groups, and reads beyond the keys if there is a remainder.
    heads, groups = query.shape[1], key.shape[1]
    expect(heads == groups or (0 < groups < heads and heads % groups == 0),
           f"{heads} heads of query for {groups} of key and value")
    expect(query.shape[3] == key.shape[3] == value.shape[3] and key.shape[2] == value.shape[2],
           "query, key and value of other lengths")
    # The kernel divides by each of them.
    expect(min(heads, query.shape[2], key.shape[2]) > 0, "no heads, queries or keys")
    mask = named["attn_mask"]
    if mask is not None:
        full = (*query.shape[:3], key.shape[2])
        expect(mask.dim() in (2, 4) and all(mine in (1, theirs) for mine, theirs in zip(
            reversed(mask.shape), reversed(full), strict=False)), f"attn_mask has the size {list(mask.shape)}")


def whole_attention(named: Named) -> None:
    """Check that there are as many values as keys; the selected kernel checks the rest."""
    expect(named["key"].shape[-2] == named["value"].shape[-2], "key and value of other lengths")


def attention_with_residuals(named: Named) -> None:
    """Check attention that returns what its backward pass needs, for whichever kernel."""
    query, key, value = named["query"], named["key"], named["value"]
    expect(query.dim() == key.dim() == value.dim() == 4, "query, key and value have not 4 dimensions")
    expect(key.shape[:3] == value.shape[:3], "key and value of other batches, heads or lengths")
    expect(query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3], "query and key of other batches or sizes")
    heads, groups = query.shape[1], key.shape[1]
    expect(heads == groups or (named["enable_gqa"] and 0 < groups < heads and heads % groups == 0),
           f"{heads} heads of query for {groups} of key and value")
    expect(min(*query.shape, *key.shape, *value.shape) > 0, "no elements")
    expect(query.device == key.device == value.device, "query, key and value on other devices")
    expect(0 <= named["dropout_p"] <= 1, f"dropout_p {named['dropout_p']}")
    mask = named["attn_mask"]
    if mask is not None:
        full = (*query.shape[:3], key.shape[2])
        expect(mask.dim() in (2, 4) and all(mine in (1, theirs) for mine, theirs in zip(
            reversed(mask.shape), reversed(full), strict=False)), f"attn_mask has the size {list(mask.shape)}")
        expect(mask.dtype in (torch.bool, query.dtype), f"attn_mask has the dtype {mask.dtype}")


def attention_residuals(named: Named) -> None:
    """Check what the backward pass of such attention is given."""
    attention_with_residuals(named)
    query = named["query"]
    for name in ("grad_out", "out"):
        size_is(named, name, (*query.shape[:3], named["value"].shape[3]))
    size_is(named, "logsumexp", (*query.shape[:2], padded_rows(query.shape[2])))
    expect(named["logsumexp"].dtype == dtype_of_sums(query.dtype), "logsumexp of another dtype")
    size_is(named, "random", (2,))
    expect(named["random"].dtype == torch.int64, "random of another dtype")


def whole_batch_norm(named: Named) -> None:
    """Check batch norm and its backward pass: there is a number for each channel, in one dtype."""
    tensor, weight = named["input"], named["weight"]
    expect(tensor.dim() >= 2 and tensor.numel() > 0, "input is empty or has less than 2 dimensions")
    for name in ("weight", "bias", "running_mean", "running_var", "mean", "variance", "save_mean", "save_invstd"):
        given = named.get(name)
        if given is not None:
            size_is(named, name, (tensor.shape[1],))
            expect(given.dtype == weight.dtype and given.device == tensor.device, f"{name} does not fit weight")
    expect((named.get("running_mean") is None) == (named.get("running_var") is None), "one of two statistics")
    if "grad_out" in named:
        same_size(named, "input", "grad_out")
        expect(named["grad_out"].dtype == tensor.dtype, "grad_out of another dtype")


def whole_rms_norm(named: Named) -> None:
    """Check RMS norm and its backward pass: the last dimensions are normalized, and everything is of one dtype."""
    tensor, size = named["input"], tuple(named["normalized_shape"])
    expect(0 < len(size) <= tensor.dim() and tuple(tensor.shape[-len(size):]) == size and tensor.numel() > 0,
           f"input has the size {list(tensor.shape)}, and {list(size)} are normalized")
    for name, wanted, dtype in (("weight", size, tensor.dtype), ("grad_out", tuple(tensor.shape), tensor.dtype),
                                ("rstd", size_of_rms(tensor, size), dtype_of_rms(tensor.dtype))):
        given = named.get(name)
        if given is not None:
            size_is(named, name, wanted)
            expect(given.dtype == dtype and given.device == tensor.device, f"{name} does not fit input")


def recurrent_network(gates: int) -> Rule:
    """Rule for all layers of a recurrent network at once."""

    def rule(named: Named) -> None:
        params = named["params"]
        expect("batch_sizes" not in named or named["batch_sizes"].numel() > 0, "batch_sizes is empty")
        states = named["hx"] if isinstance(named["hx"], (list, tuple)) else [named["hx"]]
        cells = named["num_layers"] * (1 + named["bidirectional"])
        each = 4 if named["has_biases"] else 2
        fits = cells > 0 and len(params) in (cells * each, cells * (each + 1))
        expect(fits, f"{len(params)} params for {cells} cells")
        projects, each = len(params) == cells * (each + 1), len(params) // cells
        rows = params[0].shape[0]
        hidden = rows // gates
        expect(hidden > 0 and rows == hidden * gates, f"{rows} rows for {gates} gates")
        given = params[each - 1].shape[0] if projects else hidden
        width = named["input" if "input" in named else "data"].shape[-1]
        for cell in range(cells):
            own = params[cell * each : (cell + 1) * each]
            taken = width if cell <= named["bidirectional"] else given * (1 + named["bidirectional"])
            sizes = [(rows, taken), (rows, given), *([(rows,)] * 2 * named["has_biases"]), (given, hidden)][:each]
            for param, size in zip(own, sizes, strict=True):
                expect(tuple(param.shape) == size, f"params of the size {list(param.shape)}, not {list(size)}")
        for state, extent in zip(states, (given, hidden), strict=False):
            expect(state.shape[0] == cells and state.shape[-1] == extent, f"hx of the size {list(state.shape)}")
        expect(all(state.shape[:-1] == states[0].shape[:-1] for state in states), "states of other batches")
        if "input" in named:
            batch = named["input"].shape[0 if named["batch_first"] else 1]
            expect(named["input"].dim() == 3, "input has not 3 dimensions")
            expect(states[0].shape[1] == batch, f"hx of a batch of {states[0].shape[1]}, not {batch}")

    return rule


def packed_network(named: Named) -> None:
    """Check a network over a packed sequence, whose sizes of batches never rise."""
    data, sizes, states = named["data"], named["batch_sizes"], named["hx"]
    _network_of_mode(named)
    expect(data.dim() == 2, "data has not 2 dimensions")
    expect(len(sizes) > 0 and min(sizes) > 0 and all(one >= other for one, other in pairwise(sizes))
           and sum(sizes) == data.shape[0], f"the sizes of batches {list(sizes)[:20]} for {data.shape[0]} rows")
    expect(states[0].shape[1] == sizes[0], f"hx of a batch of {states[0].shape[1]}, not {sizes[0]}")


def recurrent_network_backward(named: Named) -> None:
    """Check the gradients of a network's results, and its operands."""
    tensor, states = named["input"], named["hx"]
    if named["batch_sizes"]:
        packed_network({**{name: item for name, item in named.items() if name != "input"}, "data": tensor})
    else:
        _network_of_mode({name: item for name, item in named.items() if name != "batch_sizes"})
    expect(min(*tensor.shape, *states[0].shape) > 0, "no elements")
    width = states[0].shape[2] * (1 + named["bidirectional"])
    wanted = [(*tensor.shape[:-1], width), *(tuple(state.shape) for state in states)]
    found = [tuple(gradient.shape) for gradient in named["gradients"]]
    expect(found == wanted, f"gradients of the sizes {found[:3]}, not {wanted}")


def _network_of_mode(named: Named) -> None:
    mode, states, params = named["mode"], named["hx"], named["params"]
    expect(mode in _GATES and len(states) == (2 if mode == _LSTM else 1), f"{len(states)} states for the mode {mode}")
    expect(all(state.dim() == 3 for state in states), "hx has not 3 dimensions")
    cells = named["num_layers"] * (1 + named["bidirectional"])
    expect(mode == _LSTM or len(params) == cells * (4 if named["has_biases"] else 2), "params of other layers")
    recurrent_network(_GATES[mode])({name: item for name, item in named.items() if name != "batch_sizes"})


def attention_backward(named: Named) -> None:
    """Check that gradients and results have the size of the queries."""
    attention(named)
    query = named["query"]
    for name in ("grad_out", "out"):
        size_is(named, name, query.shape)
    size_is(named, "logsumexp", query.shape[:3])


def multi_head_attention(named: Named) -> None:
    """Check that the projections fit the embedding."""
    heads, width = named["num_heads" if "num_heads" in named else "num_head"], named["embed_dim"]
    expect(heads > 0 and width > 0 and width % heads == 0, f"{heads} heads for {width}")
    for name, size in (("qkv_weight", (3 * width, width)), ("qkv_bias", (3 * width,)),
                       ("proj_weight", (width, width)), ("proj_bias", (width,))):
        size_is(named, name, size)
    for name in ("query", "key", "value", "src"):
        if name in named:
            expect(named[name].dim() == 3 and named[name].shape[2] == width, f"{name} has not 3 dimensions")
    for name in ("norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2"):
        if name in named:
            size_is(named, name, (width,))


def encoder_layer(named: Named) -> None:
    """Check that the weights of a whole layer fit the embedding."""
    multi_head_attention(named)
    inner = named["ffn_weight_1"].shape[0]
    for name, size in (("ffn_weight_1", (inner, named["embed_dim"])), ("ffn_bias_1", (inner,)),
                       ("ffn_weight_2", (named["embed_dim"], inner)), ("ffn_bias_2", (named["embed_dim"],))):
        size_is(named, name, size)


def fused_optimizer(*states: str) -> Rule:
    """Rule for an optimizer that processes lists of parameters and of states at once."""

    def rule(named: Named) -> None:
        parameters = named["self"]
        for name in ("grads", *states):
            given = named[name]
            if not given:
                continue
            expect(len(given) == len(parameters), f"{len(given)} {name} of {len(parameters)} parameters")
            for parameter, state in zip(parameters, given, strict=True):
                expect(state.shape == parameter.shape and state.stride() == parameter.stride()
                       and state.dtype == parameter.dtype, f"one of {name} does not fit its parameter")
        needed = [name for name in states if name not in ("max_exp_avg_sqs", "momentum_buffer_list")]
        expect(all(named[name] or not parameters for name in ("grads", *needed)), "a list of states is empty")
        if named.get("amsgrad"):
            expect(len(named["max_exp_avg_sqs"]) == len(parameters), "max_exp_avg_sqs is missing")
        if named.get("momentum"):
            expect(len(named["momentum_buffer_list"]) == len(parameters), "momentum_buffer_list is missing")
        for step in named.get("state_steps", ()):
            expect(step.numel() == 1, "a state_step has not one element")
        if "state_steps" in named:
            expect(len(named["state_steps"]) == len(parameters), "state_steps does not fit")
        for name in ("grad_scale", "found_inf"):
            numel_is(named, name, 1)

    return rule


_LSTM = 2
_GATES = {_LSTM: 4, 3: 3, 0: 1, 1: 1}
"""Number of gates of a recurrent layer by mode: LSTM, GRU, and the plain ones."""


def recurrent(named: Named) -> None:
    """Check that weights and states fit one oneDNN layer."""
    tensor, hidden = named["input"], named["hidden_size"]
    first = 0 if "weight0" in named else 1
    weights = [named[f"weight{first + index}"] for index in range(4)]
    # The kernel divides by the width, and by the number of sequences.
    expect(tensor.dim() == 3 and tensor.numel() > 0 and named["mode"] in _GATES, "no recurrent layer")
    # The kernel takes the length from the first dimension, ignoring `batch_first`.
    expect(hidden > 0 and not named["batch_sizes"], "a layer that is not run here")
    rows = _GATES[named["mode"]] * hidden
    expect(tuple(weights[0].shape) == (rows, tensor.shape[2]), "the weights do not fit the input")
    expect(tuple(weights[1].shape) == (rows, hidden), "the weights do not fit the state")
    if named["has_biases"]:
        expect(all(weight.numel() == rows for weight in weights[2:]), "the biases do not fit")
    state = tensor.shape[1] * hidden
    numel_is(named, "hx_", state)
    for name in ("cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"):
        numel_is(named, name, state, or_empty=named["mode"] != 2)
    for name in ("output", "grad_output"):
        if named.get(name) is not None:
            size_is(named, name, (*tensor.shape[:2], hidden))


_WORKSPACES: dict[tuple[Any, ...], int] = {}
"""Elements of the workspace of a layer's forward pass, by the arguments that determine them."""


def recurrent_backward(named: Named) -> None:
    """Check the results of the forward pass."""
    recurrent(named)
    words = [named[name] for name in ("mode", "hidden_size", "num_layers", "has_biases", "bidirectional")]
    key = (tuple(named["input"].shape), named["input"].dtype, *words)
    wanted = _WORKSPACES.get(key)
    if wanted is None:
        if len(_WORKSPACES) >= 256:
            _WORKSPACES.clear()
        wanted = _WORKSPACES[key] = _workspace(named)
    numel_is(named, "workspace", wanted)


def _workspace(named: Named) -> int:
    # For memory estimates, arguments are placeholders, for which the kernel computes nothing.
    arguments = [torch.zeros(named[name].shape, dtype=named[name].dtype) for name in (
        "input", "weight1", "weight2", "weight3", "weight4", "hx_", "cx_tmp")]
    with torch.inference_mode(mode=False), torch.enable_grad():
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
            *arguments, named["reverse"], [], named["mode"], named["hidden_size"], named["num_layers"],
            named["has_biases"], named["bidirectional"], named["batch_first"], True)
    return int(workspace.numel())
