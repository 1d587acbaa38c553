"""Results whose layout meta kernels choose are inferred where eager chooses the same one."""

from __future__ import annotations

import pytest
import torch

from djinn.ir.schema import facts_of
from djinn_plugins.device.shapes.rules import is_believable

_CUBE, _SQUARE = torch.arange(60).reshape(3, 4, 5), torch.arange(27).reshape(3, 9)
IN_ORDER = {
    "last column": _SQUARE[:, -1:], "last columns": _CUBE[:, :, -2:], "column": _SQUARE[:, 3],
    "steps": _CUBE[::2, ::2, ::3], "repeated": torch.arange(3)[:, None].expand(3, 4),
}
OTHERS = {
    "transposed": _SQUARE.t(), "turned": _CUBE.permute(1, 2, 0), "repeated row": torch.arange(3).expand(4, 3),
    "row of columns": _SQUARE.t()[:1],
}


@pytest.mark.parametrize("name", [*IN_ORDER, *OTHERS])
@pytest.mark.parametrize("sought", [1, 50])
def test_isin_is_inferred_where_its_operand_lies_in_order(name: str, sought: int) -> None:
    here = {**IN_ORDER, **OTHERS}[name], torch.arange(sought)
    there = [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta") for one in here]
    is_inferred = is_believable(facts_of(torch.ops.aten.isin.Tensor_Tensor), there)
    assert is_inferred == (name in IN_ORDER)
    if is_inferred:
        assert torch.isin(*there).stride() == torch.isin(*here).stride()
