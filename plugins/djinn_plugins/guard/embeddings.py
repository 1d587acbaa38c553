"""Conditions for embeddings, whose kernels look up rows by indices, and bags by offsets."""

from __future__ import annotations

from djinn_plugins.guard.preconditions import (
    Named,
    expect,
    expect_as_eager,
    has_elements,
    in_order,
    numel_is,
    rows_exist,
    size_is,
    within,
)

__all__ = ("embedding_backward", "embedding_bag", "embedding_bag_backward", "embedding_bag_whole")


def embedding_backward(named: Named) -> None:
    """Check the gradient of an embedding."""
    gradient, indices = named["grad_output" if "grad_output" in named else "grad"], named["indices"]
    expect(gradient.dim() > 0 and gradient.numel() == indices.numel() * gradient.shape[-1],
           "grad_output does not fit indices")
    _padding_exists(named, named["num_weights"])
    within(named, "indices", 0, named["num_weights"])


def _padding_exists(named: Named, rows: int) -> None:
    """Check that the row that is exempt from a gradient is one; a negative number, and none, mean that none is."""
    padding = named.get("padding_idx")
    expect(padding is None or padding < rows, f"padding_idx {padding} of {rows} rows")


def _bags(named: Named) -> int:
    """Check offsets, and return the number of bags."""
    indices, offsets = named["indices"], named["offsets"]
    if indices.dim() == 2:
        return int(indices.shape[0])
    in_order(named, "offsets", 0, indices.numel())
    expect(offsets.numel() > 0, "offsets is empty")
    bags = int(offsets.numel()) - bool(named.get("include_last_offset"))
    expect(bags > 0 or not indices.numel(), "indices in no bag")
    return bags


def embedding_bag(named: Named) -> None:
    """Check an embedding of bags."""
    indices, offsets = named["indices"], named["offsets"]
    expect_as_eager(indices.dim() in (1, 2),
                    f"input has to be a 1D or 2D Tensor, but got Tensor of dimension {indices.dim()}")
    expect_as_eager(offsets.dim() == 1, f"offsets has to be a 1D Tensor, but got Tensor of dimension {offsets.dim()}")
    expect(indices.dim() == 1, "indices have not 1 dimension")
    _bags(named)
    weight = named["weight"]
    expect(0 <= named["mode"] <= 2, f"mode {named['mode']}")
    expect_as_eager(weight.dim() == 2, f"weight has to be a 2D Tensor, but got Tensor of dimension {weight.dim()}")
    rows_exist(indices, weight.shape[0])
    _padding_exists(named, weight.shape[0])
    numel_is(named, "per_sample_weights", named["indices"].numel())


def embedding_bag_backward(named: Named) -> None:
    """Check the gradients of an embedding of bags, and the results of the forward pass."""
    gradient, indices = named["grad"], named["indices"]
    expect(gradient.dim() == 2 and indices.dim() == 1, "grad has not 2 dimensions, or indices not 1")
    bags = gradient.shape[0]
    if "offsets" in named:
        in_order(named, "offsets", 0, indices.numel())
    classes = named["num_weights"] if "num_weights" in named else named["weight"].shape[0]
    expect(0 <= named["mode"] <= 2, f"mode {named['mode']}")
    _padding_exists(named, classes)
    within(named, "indices", 0, classes)
    numel_is(named, "offset2bag", indices.numel(), or_empty="offsets" in named)
    within(named, "offset2bag", 0, bags)
    numel_is(named, "per_sample_weights", indices.numel())
    if "weight" in named:
        expect(named["weight"].dim() == 2 and named["weight"].shape[1] == gradient.shape[1], "grad does not fit weight")
    if "bag_size" in named:
        numel_is(named, "bag_size", bags, or_empty=named["mode"] == 0)
    if named["mode"] == 2:
        size_is(named, "maximum_indices", gradient.shape)
        within(named, "maximum_indices", -1, classes)
    elif "offsets" in named and not named["offset2bag"].numel() and indices.numel():
        offsets = named["offsets"]
        expect(offsets.numel() > 0, "offsets is empty")
        if has_elements(offsets):
            expect(int(offsets[0]) == 0, "offsets does not begin with 0")
            # The kernel counts the offsets up to each index. An offset at the end of the indices begins no bag.
            expect(int((offsets < indices.numel()).sum()) <= bags, "more offsets than bags")


def embedding_bag_whole(named: Named) -> None:
    """Check an embedding of bags as a whole, which may have no offsets."""
    if named["offsets"] is not None:
        embedding_bag(named)
