"""Everything that makes a tensor makes the one that eager makes, or refuses where eager refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.recording.eager import DEVICE, assert_same, outcome

from djinn import LazyTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.range is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.asarray:UserWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
]

SETTINGS: list[dict[str, Any]] = [
    {}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"dtype": torch.complex64}, {"dtype": torch.int32},
    {"dtype": torch.bool}, {"requires_grad": True}, {"dtype": torch.int32, "requires_grad": True},
    {"layout": torch.strided}, {"pin_memory": False},
]
SIZED = {name: [((2, 3),), (2, 3), ((),), ((0, 3),), (-1,), ("a",)] for name in ("zeros", "ones", "rand", "randn")}
FACTORIES: dict[str, list[tuple[Any, ...]]] = {
    **SIZED,
    "full": [((2,), 3), ((2,), 3.5), ((2,), True), ((2,), 1j), ((), 2), ((2,), float("inf")), ((2,), 300)],
    "arange": [(5,), (1, 5), (1, 6, 2), (0.0, 1.0, 0.3), (3, 3), (5, 1), (5, 1, -1), (0, 5, 0)],
    "range": [(0, 5), (0.0, 6.0, 2.0)],
    "linspace": [(0, 1, 5), (0, 10, 3), (0, 1, 0), (0, 1, 1), (0, 1, -1)],
    "logspace": [(0, 1, 5), (0, 1, 3, 2.0)],
    "eye": [(3,), (2, 3), (0,), (-1,)],
    "randint": [(5, (3,)), (2, 5, (3,)), (5, 2, (3,))],
    "randperm": [(5,), (0,), (-1,)],
    "normal": [(0.0, 1.0, (3,)), (1.0, -2.0, (2, 2))],
    "tril_indices": [(3, 3), (3, 4, 1), (0, 0)],
    "triu_indices": [(3, 3), (3, 4, -1)],
    "scalar_tensor": [(3.0,), (2,), (True,)],
    "bartlett_window": [(5,), (5, False), (0,), (1,)],
    "blackman_window": [(5,), (5, False)],
    "hamming_window": [(5,), (5, False), (5, True, 0.5), (5, True, 0.5, 0.4)],
    "hann_window": [(5,), (5, False)],
    "kaiser_window": [(5,), (5, False), (5, True, 10.0)],
    "fft.fftfreq": [(5,), (4, 0.5)],
    "fft.rfftfreq": [(5,), (4, 0.5)],
}


def _function(name: str) -> Callable[..., Any]:
    space, _, name = name.rpartition(".")
    found: Callable[..., Any] = getattr(torch.fft if space else torch, name)
    return found


def _realised(action: Callable[[], Any]) -> Any:
    """An action's result and whether it raised at its line; its values must come home without complaint."""
    made = outcome(action)
    if isinstance(made, LazyTensor):
        made.cpu()
    return made


def _each(device: str, actions: Iterator[Callable[[], Any]]) -> list[Any]:
    made = []
    for action in actions:
        torch.manual_seed(0)
        made.append(_realised(action))
    return made


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_with_every_setting(name: str) -> None:
    function = _function(name)

    def program(device: str) -> list[Any]:
        return _each(device, ((lambda a=arguments, s=settings: function(*a, device=device, **s))
                              for arguments in FACTORIES[name] for settings in SETTINGS))

    made = assert_same(program)
    assert any(isinstance(item, LazyTensor) for item in made)
    assert all(item.device == DEVICE for item in made if isinstance(item, torch.Tensor))


@pytest.mark.parametrize("name", [
    name for name in FACTORIES if "window" not in name and name not in ("tril_indices", "triu_indices", "scalar_tensor")
])
def test_factories_that_write_into_a_tensor(name: str) -> None:
    function = _function(name)
    targets: list[Callable[[str], torch.Tensor]] = [
        lambda device: torch.empty(0, device=device), lambda device: torch.empty(0, dtype=torch.float64, device=device),
        lambda device: torch.empty(0, dtype=torch.int64, device=device),
    ]

    def program(device: str) -> list[Any]:
        return _each(device, ((lambda a=arguments, t=target: function(*a, out=t(device)))
                              for arguments in FACTORIES[name] for target in targets))

    assert_same(program)


@pytest.mark.parametrize(("name", "arguments"), [
    ("empty", ((2, 3),)), ("empty_strided", ((2, 3), (1, 2))), ("empty_permuted", ((2, 3, 4), (0, 2, 1))),
])
def test_tensors_without_values(name: str, arguments: tuple[Any, ...]) -> None:
    def program(device: str) -> list[Any]:
        made = [outcome(lambda s=settings: _function(name)(*arguments, device=device, **s)) for settings in SETTINGS]
        return [item if isinstance(item, str) else item.detach().zero_() for item in made]

    assert_same(program)


BASES: dict[str, Callable[[str], torch.Tensor]] = {
    "contiguous": lambda device: torch.arange(24.0).reshape(2, 3, 2, 2).to(device),
    "channels_last": lambda device: (
        torch.arange(24.0).reshape(2, 3, 2, 2).to(device, memory_format=torch.channels_last)),
    "transposed": lambda device: torch.arange(24.0).reshape(2, 3, 2, 2).to(device).transpose(1, 2),
    "strided": lambda device: torch.arange(24.0).reshape(2, 3, 2, 2).to(device)[:, ::2],
    "expanded": lambda device: torch.arange(4.0).reshape(1, 1, 2, 2).to(device).expand(4, 3, 2, 2),
    "integers": lambda device: torch.arange(24).reshape(2, 3, 2, 2).to(device),
}
LIKE_SETTINGS: list[dict[str, Any]] = [
    {}, {"dtype": torch.float64}, {"memory_format": torch.channels_last}, {"memory_format": torch.contiguous_format},
    {"requires_grad": True}, {"dtype": torch.int64}, {"device": "cpu"},
]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("name", "arguments"), [
    ("zeros_like", ()), ("ones_like", ()), ("rand_like", ()), ("randn_like", ()), ("full_like", (3,)),
    ("full_like", (3.5,)), ("full_like", (True,)), ("randint_like", (5,)), ("randint_like", (2, 5)),
])
def test_tensors_like_others(name: str, arguments: tuple[Any, ...], base: str) -> None:
    def program(device: str) -> list[Any]:
        like = BASES[base](device)
        local = [{**s, "device": device} if s.get("device") is None else s for s in LIKE_SETTINGS
                 if device == "cpu" or "rand" not in name or s.get("device") is None]
        made = _each(device, ((lambda s=s: getattr(torch, name)(like, *arguments, **s)) for s in local))
        return made[: len(LIKE_SETTINGS) - ("rand" in name)]

    assert_same(program)


@pytest.mark.parametrize("base", ["contiguous", "transposed", "integers"])
def test_methods_that_make_tensors(base: str) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("new_zeros", ((2, 3),)), ("new_zeros", (2, 3)), ("new_ones", (2,)), ("new_full", ((2, 2), 4.5)),
        ("new_full", ((2, 2), 4)), ("new_tensor", ([1, 2],)), ("new_tensor", (3,)), ("new_tensor", (np.arange(3),)),
        ("new_tensor", (torch.arange(3),)), ("new_tensor", ([],)), ("new", ([1, 2],)),
    ]

    def program(device: str) -> list[Any]:
        like = BASES[base](device)
        made = _each(device, (
            (lambda n=name, a=arguments, s=settings: getattr(like, n)(*a, **s))
            for name, arguments in calls for settings in ({}, {"dtype": torch.int32}, {"requires_grad": True})
            if name != "new" or not settings))
        empty = [like.new_empty((2, 3)), like.new_empty_strided((2, 3), (1, 2)), like.new(2, 3), like.new()]
        return [*made, *(item.zero_() for item in empty)]

    assert_same(program)


THINGS: dict[str, Any] = {
    "list": [1, 2], "nested": [[1.0, 2.0], [3.0, 4.0]], "empty": [], "empty_nested": [[], []], "integer": 3,
    "float": 2.5, "bool": True, "complex": 1 + 2j, "array": np.arange(3), "float_array": np.ones((2, 2), np.float32),
    "numpy_float": np.float32(3), "numpy_integer": np.int64(3), "numpy_bool": np.bool_(True),
    "transposed_array": np.arange(6.0).reshape(2, 3).T, "list_of_numpy": [np.float32(1), np.float32(2)],
    "array_of_nothing": np.zeros((0, 2)), "unsigned_array": np.arange(3, dtype=np.uint16), "range": range(3),
    "mixed": [1, 2.5, True], "large": 2**40, "too_large": 2**70, "string": "abc", "none": None,
    "ragged": [[1], [2, 3]], "objects": np.array([None]), "tensor": torch.arange(3), "dictionary": {},
    "list_of_tensors": [torch.tensor(1.0), torch.tensor(2.0)], "size": torch.Size([1, 2]), "infinity": [float("inf")],
}


@pytest.mark.parametrize("name", THINGS)
def test_tensors_of_anything(name: str) -> None:
    thing = THINGS[name]

    def program(device: str) -> list[Any]:
        actions: list[Callable[[], Any]] = []
        for settings in ({}, {"dtype": torch.float32}, {"dtype": torch.int64}, {"dtype": torch.bool}):
            for function in (torch.tensor, torch.as_tensor, torch.asarray):
                actions += [
                    lambda f=function, s=settings: f(thing, device=device, **s),
                    lambda f=function, s=settings: _within(device, lambda: f(thing, **s)),
                ]
        actions.append(lambda: torch.tensor(thing, device=device, requires_grad=True))
        return _each(device, iter(actions))

    made = assert_same(program)
    assert all(item.device == DEVICE for item in made if isinstance(item, torch.Tensor))


def _within(device: str, action: Callable[[], Any]) -> Any:
    with torch.device(device):
        return action()


NESTS: dict[str, Callable[[str], Any]] = {
    "scalars": lambda device: [torch.tensor(1.0).to(device), torch.tensor(2.0).to(device)],
    "one": lambda device: torch.tensor([1.0, 2.0]).to(device),
    "nested": lambda device: [[torch.tensor(1).to(device), 2], [3, torch.tensor(4).to(device)]],
    "mixed": lambda device: [torch.tensor([1.0]).to(device), 2.0],
    "vector": lambda device: [torch.tensor([1.0, 2.0]).to(device)],
    "with_gradient": lambda device: torch.tensor([1.0]).to(device).requires_grad_(),
}


@pytest.mark.parametrize("function", [torch.tensor, torch.as_tensor, torch.asarray])
@pytest.mark.parametrize("name", NESTS)
def test_tensors_of_remote_tensors(name: str, function: Callable[..., torch.Tensor]) -> None:
    def program(device: str) -> list[Any]:
        return _each(device, iter([
            lambda: function(NESTS[name](device), device=device),
            lambda: function(NESTS[name](device)),
            lambda: function(NESTS[name](device), dtype=torch.float64, device=device),
            lambda: _within(device, lambda: function(NESTS[name](device))),
        ]))

    assert_same(program)
    home, expected = (outcome(lambda d=device: function(NESTS[name](d), device="cpu").tolist())
                      for device in (str(DEVICE), "cpu"))
    assert home == expected


def test_identities_are_those_of_eager() -> None:
    def program(device: str) -> list[bool]:
        x = torch.ones(2, device=device)
        return [torch.as_tensor(x) is x, torch.as_tensor(x, device=device) is x, torch.asarray(x) is x,
                torch.asarray(x, copy=False).data_ptr() == x.data_ptr(),
                torch.asarray(x, copy=True).data_ptr() == x.data_ptr()]

    assert_same(program)


def test_arrays_and_buffers_are_uploaded() -> None:
    array = np.arange(3.0)
    remote = torch.from_numpy(array).to(DEVICE)
    array[0] = 9.0
    assert remote.tolist() == [0, 1, 2]
    assert torch.frombuffer(bytearray(8), dtype=torch.float32).to(DEVICE).tolist() == [0, 0]


def test_a_default_device_is_followed() -> None:
    def program(device: str) -> list[torch.Tensor]:
        torch.set_default_device(device)
        try:
            return [torch.randn(2), torch.tensor([1]), torch.arange(3), torch.eye(2), torch.randperm(4),
                    torch.nn.Linear(2, 2).weight.detach(), torch.hann_window(3), torch.zeros(())]
        finally:
            torch.set_default_device(None)

    made = assert_same(program)
    assert all(tensor.device == DEVICE for tensor in made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_default_dtype_is_the_one_at_the_time_of_the_call(dtype: torch.dtype) -> None:
    def program(device: str) -> list[torch.Tensor]:
        before = torch.ones(2, device=device)
        torch.set_default_dtype(dtype)
        try:
            made = [
                torch.ones(2, device=device), torch.randn(3, device=device), torch.arange(0, 1, 0.5, device=device),
                torch.arange(3, device=device), torch.full((2,), 1, device=device),
                torch.full((2,), 1.0, device=device),
                torch.full((2,), True, device=device), torch.full((2,), 1j, device=device),
                torch.empty_permuted((2, 3), (1, 0), device=device).zero_(), torch.range(0, 3, device=device),
                torch.eye(2, device=device), torch.linspace(0, 1, 3, device=device),
                torch.empty(2, device=device).zero_(),
                torch.scalar_tensor(2, device=device), torch.tensor(2.0, device=device), torch.zeros(2, device=device),
            ]
        finally:
            torch.set_default_dtype(torch.float32)
        return [before, *made]

    assert_same(program)


def test_inference_mode_makes_inference_tensors() -> None:
    def program(device: str) -> list[Any]:
        with torch.inference_mode():
            made = [torch.ones(2, device=device), torch.tensor([1.0], device=device), torch.randn(2, device=device)]
            return [*made, torch.zeros_like(made[0])]

    assert all(tensor.is_inference() for tensor in assert_same(program))
