"""Errors that metadata and numbers show are raised at their line, as eager raises them, also after a right call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F  # PyTorch's own name for it

import djinn

REMOTE = "remote_accelerator:0"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.uint8")


@pytest.fixture(params=["in_process", "served"], autouse=True, scope="module")
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    djinn.init(server=request.getfixturevalue("server").address if request.param == "served" else "")
    yield
    djinn.shutdown()


@attrs.frozen
class Mistake:
    """A call that is right, and one that is not."""

    id: str
    right: Callable[[Callable[..., torch.Tensor]], Any]
    wrong: Callable[[Callable[..., torch.Tensor]], Any]


def assigned(value: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Any]:
    def assign(on: Callable[..., torch.Tensor]) -> torch.Tensor:
        target = on(5, 3)
        target[on([0, 1])] = value(on) if dtype is None else value(on).to(dtype)
        return target

    return assign


def checked_rows(*components: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(*components, (2, 2), check_invariants=True)


def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:4], x[2:]


def shifted(on: Callable[..., torch.Tensor]) -> None:
    buffer = on(6)
    buffer[1:] = buffer[:-1]


def unshifted(on: Callable[..., torch.Tensor]) -> None:
    buffer = on(6)
    buffer[:3] = buffer[3:]
    buffer[::2] = buffer[1::2]
    buffer[1:] += 1
    buffer[:] = buffer[:]
    buffer.copy_(buffer).mul_(buffer[:]).add_(buffer)
    torch.exp(buffer, out=buffer)


def image(on: Callable[..., torch.Tensor]) -> torch.Tensor:
    return on(1, 1, 4, 4)


def pooled(name: str, x: torch.Tensor) -> torch.Tensor:
    return getattr(torch.nn.functional, name)(x, 2)


def sampled(x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.fractional_max_pool3d(x, 2, 2, _random_samples=samples)


DIVISIONS: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("//", lambda x, y: x // y), ("%", lambda x, y: x % y), ("fmod", torch.fmod),
    ("div", lambda x, y: torch.div(x, y, rounding_mode="trunc")), ("//=", lambda x, y: x.__ifloordiv__(y)),
    ("%=", lambda x, y: x.__imod__(y)), ("out", lambda x, y: torch.floor_divide(x, y, out=torch.empty_like(x))))
POOLS = ("max_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
         "avg_pool2d", "avg_pool3d")
MISTAKES = (
    Mistake("index_put shape", assigned(lambda on: on(2, 3)), assigned(lambda on: on(3, 3))),
    Mistake("index_put more dimensions", assigned(lambda on: on(1, 2, 3)), assigned(lambda on: on(2, 2, 3))),
    Mistake("index_put of a number", lambda on: on(4, 4).index_put_((on([0, 1]), on([1])), on(1)[0]),
            lambda on: on(4, 4).index_put_((on([0, 1]), on([0, 1, 2])), on(1)[0])),
    Mistake("index_put dtype", lambda on: on(4).index_put_((on([1]),), on(1)),
            lambda on: on(4).index_put_((on([1]),), on(1).double())),
    Mistake("no index", lambda on: on(4).index_put((on([1]),), on(1)), lambda on: on(4).index_put((), on(1))),
    Mistake("index into nothing", lambda on: on(2, 3)[on([0])], lambda on: on(0, 3)[on([0])]),
    Mistake("assigned into nothing", assigned(lambda on: on(3)), lambda on: on(0, 3).index_put_((on([0]),), on(3))),
    *(Mistake(f"{name} by bytes", lambda on, call=call: call(on(3), on(3) > 0),
              lambda on, call=call: call(on(3), (on(3) > 0).to(torch.uint8)))
      for name, call in (("masked_fill", lambda x, mask: x.masked_fill_(mask, 1.0)),
                         ("masked_select", torch.masked_select), ("assigned", lambda x, mask: x.__setitem__(mask, 1.0)),
                         ("masked_scatter", lambda x, mask: x.masked_scatter_(mask, x)))),
    Mistake("assigned by bytes of another shape", lambda on: on(3).__setitem__(on(3) > 9, on(1)),
            lambda on: on(3).__setitem__((on(4) > 9).to(torch.uint8), on(2))),
    Mistake("bucketize", lambda on: torch.bucketize(on(3), on(3)), lambda on: torch.bucketize(on(3), on(3, 3))),
    *(Mistake(f"searchsorted {name}", lambda on: torch.searchsorted(on(3), on(2, 3)), wrong) for name, wrong in (
        ("of other rows", lambda on: torch.searchsorted(on(2, 3), on(3, 3))),
        ("of a number in rows", lambda on: torch.searchsorted(on(2, 3), 1.0)),
        ("to a dtype", lambda on: torch.searchsorted(on(3), on(3), out=on([1, 2, 3]), out_int32=True)),
        ("from a side", lambda on: torch.searchsorted(on(3), on(3), side="bad")),
        ("from two sides", lambda on: torch.searchsorted(on(3), on(3), side="left", right=True)),
        ("with a short sorter", lambda on: torch.searchsorted(on(3), on(3), sorter=on([1, 0]))),
        ("with a real sorter", lambda on: torch.searchsorted(on(3), on(3), sorter=on(3))))),
    Mistake("argmax of too many dimensions", lambda on: on(*[1] * 64).argmax(0), lambda on: on(*[1] * 65).argmax(0)),
    Mistake("alpha", lambda on: on(3).add(on(3), alpha=1), lambda on: on(3).add(on(3), alpha=True)),
    Mistake("alpha of integers", lambda on: on([1]).add(on([1]), alpha=2), lambda on: on([1]).sub(on([1]), alpha=1.5)),
    Mistake("alpha in place", lambda on: on(3).add_(1.5, alpha=1.5), lambda on: on(3).add_(1, alpha=True)),
    Mistake("bernoulli", lambda on: on(3).bernoulli_(0.5), lambda on: on(3).bernoulli_(1.5)),
    Mistake("bernoulli of a chance", lambda on: torch.bernoulli(on(3), 0.5), lambda on: torch.bernoulli(on(3), -0.5)),
    Mistake("uniform", lambda on: on(3).uniform_(0.0, 1.0), lambda on: on(3).uniform_(1.0, 0.0)),
    Mistake("uniform of halves", lambda on: on(3).half().uniform_(), lambda on: on(3).half().uniform_(-1e5, 1e5)),
    Mistake("random", lambda on: on(3).random_(1, 2), lambda on: on(3).random_(2, 1)),
    Mistake("random of complex numbers", lambda on: on(3).random_(0, 2),
            lambda on: on(3).to(torch.cfloat).random_(0, 2)),
    Mistake("random of bytes", lambda on: on([1]).byte().random_(0, 256), lambda on: on([1]).byte().random_(0, 257)),
    Mistake("exponential", lambda on: on(3).exponential_(1.0), lambda on: on(3).exponential_(-0.5)),
    Mistake("cauchy", lambda on: on(3).cauchy_(0.0, 0.5), lambda on: on(3).cauchy_(0.0, -0.5)),
    Mistake("geometric", lambda on: on(3).geometric_(0.5), lambda on: on(3).geometric_(1.5)),
    Mistake("log_normal", lambda on: on(3).log_normal_(0.0, 1.0), lambda on: on(3).log_normal_(0.0, -1.0)),
    Mistake("normal", lambda on: on(3).normal_(0.0, 1.0), lambda on: on(3).normal_(0.0, math.nan)),
    Mistake("multinomial", lambda on: torch.multinomial(on(3), 3), lambda on: torch.multinomial(on(3), 4)),
    Mistake("multinomial of none", lambda on: on(3).multinomial(1), lambda on: on(3).multinomial(0)),
    Mistake("negative powers", lambda on: on([2]) ** 2, lambda on: on([2]) ** -2),
    Mistake("negative powers in place", lambda on: on([2]).pow_(2), lambda on: on([2]).pow_(-2)),
    *(Mistake(f"zero in {name}", lambda on, call=call: call(on([3, 4]), 2), lambda on, call=call: call(on([3, 4]), 0))
      for name, call in DIVISIONS if name != "out"),
    *(Mistake(f"a known zero in {name}", lambda on, call=call: call(on([3, 4]), on([2, 5]) + 1),
              lambda on, call=call: call(on([3, 4]), on([2, -1]) + 1)) for name, call in DIVISIONS),
    Mistake("a local zero", lambda on: on([3, 4]) // torch.tensor([1, 2]),
            lambda on: on([3, 4]) % torch.tensor([1, 0])),
    Mistake("a number by a known zero", lambda on: 5 // on([3]), lambda on: 5 // on([0])),
    Mistake("heaviside", lambda on: torch.heaviside(on(3), on(3)), lambda on: torch.heaviside(on(3), on(3).double())),
    *(Mistake(f"{name} of an overlapping part", lambda on, call=call: call(on(6)[:3], on(6)[3:]),
              lambda on, call=call: call(*parts(on(6)))) for name, call in (
        ("copy_", torch.Tensor.copy_), ("add_", torch.Tensor.add_), ("mul_", torch.Tensor.mul_),
        ("lerp_", lambda x, y: x.lerp_(y, 0.5)), ("addcmul_", lambda x, y: x.addcmul_(y, y)),
        ("out", lambda x, y: torch.exp(y, out=x)))),
    *(Mistake(f"{name} of integers", lambda on, name=name: pooled(name, on(1, 2, *[4] * int(name[-2]))),
              lambda on, name=name: pooled(name, on(1, 2, *[4] * int(name[-2])).int())) for name in POOLS),
    Mistake("avg_pool3d of halves", lambda on: pooled("avg_pool3d", on(1, 2, 4, 4, 4)),
            lambda on: pooled("avg_pool3d", on(1, 2, 4, 4, 4).half())),
    Mistake("pooling of nothing", lambda on: pooled("adaptive_avg_pool3d", on(1, 2, 4, 4, 4)),
            lambda on: pooled("adaptive_avg_pool3d", on(1, 2, 0, 4, 4))),
    *(Mistake(f"samples {sizes}", lambda on: sampled(on(1, 2, 4, 4, 4), on(1, 2, 3)),
              lambda on, sizes=sizes: sampled(on(1, 2, 4, 4, 4), on(*sizes)))
      for sizes in ((0, 2, 3), (1, 1, 3), (1, 2, 2), (2, 3))),
    Mistake("samples of a dtype", lambda on: sampled(on(2, 4, 4, 4), on(3, 2, 3)),
            lambda on: sampled(on(2, 4, 4, 4), on(1, 2, 3).double())),
    Mistake("shifted in place", unshifted, shifted),
    *(Mistake(f"{name} of its own indices", lambda on, call=call: call(on([2, 1, 0]), on([2, 1, 0])),
              lambda on, call=call: call(*[on([2, 1, 0])] * 2)) for name, call in (
        ("index_copy_", lambda x, y: x.index_copy_(0, y, x.clone())),
        ("index_fill_", lambda x, y: x.index_fill_(0, y, 0)),
        ("index_add_", lambda x, y: x.index_add_(0, y, x.clone())), ("put_", lambda x, y: x.put_(y, x.clone())),
        ("index_put_", lambda x, y: x.index_put_((y,), x.clone())),
        ("scatter_", lambda x, y: x.scatter_(0, y, x.clone())))),
    *(Mistake(f"{call.__name__} of integers", lambda on, call=call: call(on(3), on([1, 2, 3])),
              lambda on, call=call: call(on([1, 2, 3]), on([1, 2, 3])))
      for call in (torch.hypot, torch.nextafter, torch.logaddexp, torch.logaddexp2)),
    *(Mistake(f"{call.__name__} of bools", lambda on, call=call: call(on([1, 2]), on([1, 2])),
              lambda on, call=call: call(on([True, True]), on([True, True])))
      for call in (torch.remainder, torch.fmod, torch.gcd, torch.bitwise_left_shift, torch.bitwise_right_shift,
                   torch.vdot)),
    Mistake("ldexp by bools", lambda on: torch.ldexp(on(2), on([1, 2])),
            lambda on: torch.ldexp(on(2), on([True, False]))),
    Mistake("cross of two dtypes", lambda on: torch.linalg.cross(on(3), on(3)),
            lambda on: torch.linalg.cross(on(3), on(3).double())),
    *(Mistake(f"{name} of {dtype}", lambda on, call=call: call(image(on)),
              lambda on, call=call, dtype=dtype: call(image(on).to(dtype)))
      for name, dtype, call in (
          ("interpolation", torch.int32, lambda x: F.interpolate(x, (2, 2))),
          ("bilinear interpolation", torch.int8, lambda x: F.interpolate(x, (2, 2), mode="bilinear")),
          ("abs", torch.bool, torch.abs), ("std", torch.int64, torch.std), ("gelu", torch.int64, F.gelu),
          ("lerp", torch.int64, lambda x: x.lerp_(x, 1)), ("ceil", torch.bool, torch.ceil),
          ("convolution", torch.bool, lambda x: F.conv2d(x, x)), ("lu", torch.float16, torch.linalg.lu),
          ("cholesky", torch.int32, lambda x: torch.cholesky_solve(x, x)),
          ("bessel", torch.bfloat16, torch.special.bessel_j0), ("bernoulli", torch.int64, torch.bernoulli),
          ("rounded quotient", torch.cfloat, lambda x: torch.div(x, x, rounding_mode="floor")))),
    Mistake("polar", lambda on: torch.polar(on(3), on(3)), lambda on: torch.polar(on(3), on(3).double())),
)


def maker(device: str) -> Callable[..., torch.Tensor]:
    def make(*sizes: Any) -> torch.Tensor:
        if isinstance(sizes[0], list):
            return torch.tensor(sizes[0], device=device)
        return torch.full(sizes, 0.5, device=device)

    return make


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_an_error_comes_at_its_line(mistake: Mistake) -> None:
    with pytest.raises(Exception, match=".") as wanted:
        mistake.wrong(maker("cpu"))
    for _ in range(2):
        with pytest.raises(wanted.type) as got:
            mistake.wrong(maker(REMOTE))
        assert str(got.value) == str(wanted.value)
        mistake.right(maker(REMOTE))
    djinn.synchronize()


def test_what_may_be_divided_by_zero_is_recorded_without_a_trip() -> None:
    on = maker(REMOTE)
    whole, divisor = on([3, 4]), (on(2) * 4).round().long()
    djinn.synchronize()
    djinn.reset_stats()
    made = (whole / 0, whole[:0] // 0, on(2) // 0, on(2) % on([0, 0]), whole // divisor, whole // on([1, 2]))
    assert not djinn.stats()["round_trips"]
    assert made[-1].tolist() == [3, 2]
    # The client does not know it: the error comes at the next wait.
    kept = whole // (divisor - 2)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        kept.tolist()


def test_writes_of_separate_parts_wait_for_nothing() -> None:
    unshifted(maker(REMOTE))
    djinn.synchronize()
    djinn.reset_stats()
    unshifted(maker(REMOTE))
    assert not djinn.stats()["round_trips"]


@pytest.mark.parametrize(("count", "dtype"), [(2050, torch.float16), (129, torch.int8), (257, torch.uint8)])
def test_randperm_over_its_dtype(count: int, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError) as wanted:
        torch.randperm(count, dtype=dtype)
    torch.randperm(4, dtype=dtype, device=REMOTE)
    with pytest.raises(RuntimeError) as got:
        torch.randperm(count, dtype=dtype, device=REMOTE)
    assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_randperm_of_what_has_no_permutations(dtype: torch.dtype) -> None:
    with pytest.raises(NotImplementedError) as wanted:
        torch.randperm(3, dtype=dtype)
    with pytest.raises(NotImplementedError) as got:
        torch.randperm(3, dtype=dtype, device=REMOTE)
    assert str(got.value) == str(wanted.value)


def test_what_is_right_at_the_edge_is_recorded_without_a_trip() -> None:
    djinn.synchronize()
    before = djinn.stats()["round_trips"]
    on = maker(REMOTE)
    target = on(5, 3)
    target[on([0, 1])] = 2.0
    target[on([0, 1])] = on(3)
    target[on([0, 1]), 1:] = on(2, 1)
    target[on([0])] = on(1, 1, 3)
    on(3).uniform_(0.5, 0.5)
    on([1]).byte().random_(0, 256)
    torch.multinomial(on(3), 5, replacement=True)
    assert (on(0, 3)[on([]).long()]).shape == (0, 3)
    assert djinn.stats()["round_trips"] == before


def test_the_largest_of_unsigned_integers_is_a_number_like_others() -> None:
    largest = torch.iinfo(torch.uint64).max
    filled = torch.full((2,), largest, dtype=torch.uint64)
    assert torch.equal(filled.to(REMOTE).eq(largest).cpu(), filled.eq(largest))


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_unbind_along_a_dimension_that_is_not_there(dim: int) -> None:
    with pytest.raises(IndexError) as wanted:
        torch.ones(2, 3).unbind(dim)
    tensor = torch.ones(2, 3, device=REMOTE)
    assert [row.tolist() for row in tensor.unbind()] == [[1.0] * 3] * 2
    assert torch.ones(2, 0, device=REMOTE).unbind(1) == ()
    for unbind in (torch.Tensor.unbind, torch.unbind, torch.ops.aten.unbind.int):
        with pytest.raises(IndexError) as got:
            unbind(tensor, dim)
        assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_the_degree_of_a_polynomial_may_be_an_unsigned_integer(dtype: torch.dtype) -> None:
    x, degree = torch.tensor([0.5, 2.0]), torch.tensor([3, 2], dtype=dtype)
    wanted = torch.special.chebyshev_polynomial_t(x, degree)
    assert torch.equal(torch.special.chebyshev_polynomial_t(x.to(REMOTE), degree.to(REMOTE)).cpu(), wanted)


LENGTHS: list[tuple[Any, list[int], list[int], int]] = [
    ([[1, 2], [1, 1]], [9, 5], [2, 2], 0), ([[1, 2], [1, 1]], [5, -1], [2, 2], 0),
    ([[1, 2], [1, 1]], [5, 5], [2, -1], 0), ([[1, 2], [1, 1]], [5], [2, 2], 0), ([[1, 2], [1, 1]], [5, 5], [2], 0),
    ([[1, 2]], [5, 5], [2, 2], 0), ([[1, 2], [1, 1]], [5, 5], [2, 3], 0), ([1, 2, 1], [5, 5], [2, 2], 0),
    ([[1, 2], [1, 1]], [5, 5], [2, 2], 7), ([[[1, 2]]], [5, 5], [2, 2], 0),
]


@pytest.mark.parametrize(("targets", "inputs", "wanted", "blank"), LENGTHS)
def test_a_ctc_loss_that_does_not_fit_is_refused_in_eagers_words(
    targets: Any, inputs: list[int], wanted: list[int], blank: int
) -> None:
    texts = []
    for device in ("cpu", "remote_accelerator:0"):
        scores = torch.zeros(5, 2, 4, device=device).log_softmax(-1)
        with pytest.raises(RuntimeError) as caught:
            F.ctc_loss(scores, torch.tensor(targets, device=device), torch.tensor(inputs), torch.tensor(wanted),
                       blank).tolist()
        texts.append(str(caught.value).partition("\n")[0])
    assert texts[0] == texts[1]
