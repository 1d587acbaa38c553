"""A plugin of pytest's: transformers' comparison of attentions holds the device to the tolerances of the CPU.

transformers has a table of tolerances by type of device in that one function. It has no row for devices of third
parties, and holds these to 1e-7 in half precision too, which the CPU does not meet either.
"""

from __future__ import annotations

import sys
import types


class _LikeTheCpu(str):
    """A device's name that is found where the CPU is."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "cpu"

    def __hash__(self) -> int:
        return hash("cpu")


def pytest_collection_finish() -> None:
    """Give the function its own idea of what the device is called."""
    module = sys.modules.get("tests.test_modeling_common")
    if module is None:
        return
    function = module._test_eager_matches_sdpa_inference
    own = {**function.__globals__, "torch_device": _LikeTheCpu(module.torch_device)}
    made = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    for name, user in list(sys.modules.items()):
        if name.startswith("tests.") and vars(user).get(function.__name__) is function:
            setattr(user, function.__name__, made)
