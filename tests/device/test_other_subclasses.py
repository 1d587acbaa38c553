"""Tensor subclasses of other libraries meet remote tensors as they would meet ordinary ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from djinn.session import runtime

DEVICES = ("cpu", "remote_accelerator:0")


class Halved(torch.Tensor):
    """A weight that is stored as a half of itself, as quantizing libraries make such: it knows one function."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=stored.device)
        return made

    def __init__(self, stored: torch.Tensor) -> None:
        self.stored = stored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, known) for known in types):
            return NotImplemented
        if func is F.linear:
            return F.linear(args[0], args[1].stored * 2)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Halved does not know {func}")


@pytest.mark.parametrize("device", DEVICES)
def test_a_subclass_handles_the_functions_that_it_knows_whichever_operand_comes_first(device: str) -> None:
    weight = torch.arange(6.0, device=device).reshape(2, 3)
    inputs = torch.ones(4, 3, device=device)
    result = F.linear(inputs, Halved(weight / 2))
    assert type(result) is type(inputs)
    assert torch.equal(result, F.linear(inputs, weight))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_subclass_does_not_know_is_its_own_error(device: str) -> None:
    with pytest.raises(NotImplementedError, match="Halved does not know aten"):
        torch.ones(2, device=device) + Halved(torch.ones(2, device=device))


class Wrapped(torch.Tensor):
    """A tensor around another one, which carries out all operators on that one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(Wrapped, lambda wrapped: wrapped.inner, args), **(kwargs or {}))


WITH_ORDINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copied into": lambda plain, wrapped: plain.clone().copy_(wrapped),
    "compared": torch.equal,
    "added": torch.add,
    "zeros": lambda plain, wrapped: torch._efficientzerotensor(4, device=plain.device) + wrapped,
}


@pytest.mark.parametrize("act", WITH_ORDINARY.values(), ids=WITH_ORDINARY.keys())
@pytest.mark.parametrize("inner", DEVICES)
@pytest.mark.usefixtures("session")
def test_a_tensor_around_another_one_is_never_read_for_its_memory(act: Any, inner: str) -> None:
    data = torch.arange(6.0)
    found = act(torch.ones(4, device=DEVICES[1]), Wrapped(data.to(inner)[1:5]))
    expected = act(torch.ones(4), data[1:5])
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == (
        expected.tolist() if isinstance(expected, torch.Tensor) else expected)


@pytest.mark.usefixtures("session")
def test_what_has_no_memory_is_refused_before_it_is_sent() -> None:
    wrapped = Wrapped(torch.arange(6.0)[1:5])
    remote = torch.ones(4, device=DEVICES[1])
    with no_dispatch(), pytest.raises(RuntimeError, match="data pointer"):
        runtime.current().upload(wrapped)
    assert remote.tolist() == [1] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_tensor_around_another_one_are_metadata_where_its_class_is_not_asked(device: str) -> None:
    wrapped = Wrapped(torch.arange(6.0, device=device).reshape(2, 3))
    with no_dispatch():
        views = [wrapped.t(), wrapped.view(6), wrapped[1], torch.as_strided(wrapped, (2,), (3,), 1),
                 wrapped.unfold(1, 2, 1)]
        other = Wrapped(torch.arange(3.0, device=device)).set_(views[2])
    assert {view.device.type for view in (*views, other)} == {torch.device(device).type}
    assert [(tuple(view.shape), view.stride(), view.storage_offset()) for view in (*views, other)] == [
        ((3, 2), (1, 3), 0), ((6,), (1,), 0), ((3,), (1,), 3), ((2,), (3,), 1), ((2, 2, 2), (3, 1, 1), 0),
        ((3,), (1,), 3)]


class Image(torch.Tensor):
    """A tensor with facts about it, as libraries for images make such."""

    facts: dict[str, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        given = next((item for item in args if isinstance(item, Image)), None)
        if isinstance(made, Image) and given is not None:
            made.facts = getattr(given, "facts", {})
        return made


class Directed(torch.nn.Parameter):
    """A parameter with a method, as libraries for optimization on manifolds make such."""

    step: int

    def __new__(cls, data: torch.Tensor, step: int = 1) -> Self:
        made: Self = torch.Tensor._make_subclass(cls, data, require_grad=True)
        made.step = step
        return made

    def __init__(self, data: torch.Tensor, step: int = 1) -> None:
        """Do nothing more."""

    def name(self) -> str:
        return f"by {self.step}"


@pytest.fixture(params=DEVICES)
def image(request: pytest.FixtureRequest) -> Any:
    made = torch.arange(6.0).reshape(2, 3).to(request.param).as_subclass(Image)
    made.facts = {"channels": 3}
    return made


ACTS: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda image: image * 2 + 1,
    "another first": lambda image: torch.ones(2, 3, device=image.device) + image,
    "view": lambda image: image.T[0],
    "list": lambda image: image.split(1)[0],
    "tuple": lambda image: image.max(0)[1],
    "within a list": lambda image: torch.stack([image, image]),
    "in place": lambda image: image.clone().add_(image),
    "data": lambda image: image.data,
    "home": lambda image: image.detach().cpu(),
    "kept whole": lambda image: F.linear(image, torch.ones(4, 3, device=image.device)),
    "to the device": lambda image: image.to(DEVICES[1]),
    "copy": copy.copy,
    "file": lambda image: pickle.loads(pickle.dumps(image)),
    "parameter": lambda image: torch.nn.Parameter(image) * image,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
def test_results_of_operations_are_of_a_subclass_that_leaves_them_to_pytorch(act: Any, image: Any) -> None:
    made = act(image)
    with torch.no_grad():
        plain = act(image.as_subclass(torch.Tensor).cpu())
    assert isinstance(made, Image)
    assert made.tolist() == plain.tolist()
    assert getattr(made, "facts", None) in (None, image.facts)


def test_what_a_subclass_is_an_operand_of_keeps_its_class(image: Any) -> None:
    target = torch.zeros(2, 3, device=image.device)
    torch.add(image, 1, out=target)
    assert not isinstance(target, Image)
    assert target.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not isinstance(image.as_subclass(torch.Tensor), Image)
    weight = torch.ones(2, 3, device=image.device, requires_grad=True)
    (weight * image).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == image.tolist()


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_parameter_of_another_class_stays_one_where_its_module_goes(is_viewed: bool) -> None:
    model = torch.nn.Module()
    model.weight = weight = Directed(torch.ones(3), step=7)
    view = weight[0] if is_viewed else None
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for device, value in ((DEVICES[1], 1.0), ("cpu", 0.0)):
        model.to(device)
        assert model.weight is weight
        assert isinstance(weight, Directed)
        assert (weight.name(), weight.device.type, weight.tolist()) == (
            "by 7", torch.device(device).type, [value] * 3)
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(weight) is Directed
    del view


def test_a_parameter_of_another_class_is_made_of_remote_data() -> None:
    weight = Directed(torch.ones(2, device=DEVICES[1]), step=2)
    assert isinstance(weight, Directed)
    assert (weight.name(), weight.is_leaf, weight.requires_grad) == ("by 2", True, True)
    assert type(type(weight)(torch.ones(2))) is Directed
    with pytest.raises(RuntimeError):
        torch.nn.UninitializedParameter(device=DEVICES[1])
