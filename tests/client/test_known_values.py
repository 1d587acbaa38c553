"""What the client knows is not asked for: counted in round trips, over a guarded server."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import gpt2

import djinn
from djinn_plugins.client.known_values.answers import RememberedAnswers

pytestmark = pytest.mark.usefixtures("on_a_server")
DEVICE = "remote_accelerator:0"
NEW = 12
MODES = ("greedy", "sampled", "padded")


def _trips_of(action: Any) -> tuple[int, Any]:
    djinn.synchronize()
    djinn.reset_stats()
    made = action()
    return djinn.stats()["round_trips"], made


@pytest.fixture(scope="module")
def model() -> Any:
    return gpt2.gpt2(n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=63)


def _generated(model: Any, device: str, mode: str) -> torch.Tensor:
    ids = torch.tensor([[0, 0, 5, 6, 7], [4, 8, 15, 16, 23]] if mode == "padded" else [[3, 9, 5, 6, 7]])
    torch.manual_seed(3)
    made: torch.Tensor = model.generate(
        input_ids=ids.to(device), attention_mask=(ids != 0).long().to(device), pad_token_id=0, eos_token_id=None,
        min_new_tokens=NEW, max_new_tokens=NEW, do_sample=mode == "sampled")
    return made.cpu()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_generate_asks_only_for_what_the_model_computes(model: Any, mode: str) -> None:
    there = copy.deepcopy(model).to(DEVICE)
    wanted = _generated(model, "cpu", mode)
    trips, got = _trips_of(lambda: _generated(there, DEVICE, mode))
    assert torch.equal(got, wanted)
    assert trips <= NEW + 1, "one a token, and the text"
    assert djinn.stats()["answered_at_home"] >= (NEW if mode == "padded" else 3)


def test_a_question_about_constants_costs_no_trip() -> None:
    mask = torch.tensor([[1, 1, 0]]).to(DEVICE)
    ids = torch.arange(3, device=DEVICE)
    trips, found = _trips_of(
        lambda: (bool((mask == 1).all()), (ids + 2).tolist(), int(ids.sum()), mask[0].cpu().tolist()))
    assert (trips, found) == (0, (False, [2, 3, 4], 3, [1, 1, 0]))


def test_a_question_costs_no_trip_after_the_way_back_to_the_default_precision() -> None:
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")
    assert _trips_of(lambda: int((torch.arange(3, device=DEVICE) + 2).sum())) == (0, 9)


@pytest.mark.parametrize("is_last", [True, False])
def test_the_end_of_a_text_by_its_length_is_known_whatever_the_model_computes(is_last: bool) -> None:
    unfinished = torch.rand(2, device=DEVICE).add(1.0).long()
    ended = torch.rand(2, device=DEVICE) > 2.0

    def is_over() -> bool:
        done = torch.full((2,), is_last, device=DEVICE) | ended
        return bool((unfinished & ~done).max() == 0)

    assert _trips_of(is_over) == (int(not is_last), is_last)


@pytest.mark.parametrize(("known", "trips"), [([True, True], 0), ([True, False], 1)])
def test_an_operand_decides_only_if_all_its_elements_do(known: list[bool], trips: int) -> None:
    unknown = torch.rand(2, device=DEVICE) > 2.0
    ours = torch.tensor(known).to(DEVICE)
    assert _trips_of((ours | unknown).tolist) == (trips, known)
    assert _trips_of((~ours & ~unknown).tolist) == (trips, [not each for each in known])
    assert _trips_of((unknown.long() * (~ours).long()).tolist) == (trips, [0, 0])


@pytest.mark.parametrize(("write", "trips"), [
    (lambda ids: ids.add_(1), 0), (lambda ids: ids.view(-1)[1:].zero_(), 0), (lambda ids: ids[::2].mul_(3), 0),
    (lambda ids: torch._foreach_add_([ids.t(), ids.clone()], 2), 0),
    (lambda ids: ids.detach().masked_fill_(ids > 0, 5), 0),
    (lambda ids: ids.data.copy_(torch.ones(3)), 1), (lambda ids: ids.floor_divide_(2), 1),
], ids=["in place", "through a view", "at every other place", "in a list", "through an alias", "from here", "divided"])
def test_a_write_is_seen(write: Any, trips: int) -> None:
    here, there = torch.arange(3), torch.arange(3, device=DEVICE)
    views = [ids[1:] for ids in (here, there)]
    write(here)
    write(there)
    assert _trips_of(views[1].tolist) == (trips, views[0].tolist())


def test_single_real_numbers_are_followed_with_the_bits_of_each_device() -> None:
    def computed(device: str) -> list[Any]:
        step, rate = torch.tensor(3.0).to(device), torch.full((), 0.1, device=device, dtype=torch.float64)
        decayed = step.clone()
        for _ in range(200):
            step += 1
            decayed *= 0.999
            rate.sub_(1e-3)
        torch._foreach_add_([step, rate], 1)
        return [step.item(), decayed.item(), float(rate), bool(step > 203.5), step[None].tolist()]

    assert _trips_of(lambda: computed(DEVICE)) == (0, computed("cpu"))
    unlimited = torch.full((), float("inf"), device=DEVICE)
    assert _trips_of(lambda: (unlimited - unlimited).isnan().item()) == (1, True)


def test_floats_large_tensors_and_divisions_are_asked_for() -> None:
    ids = torch.arange(4, device=DEVICE)
    large = torch.zeros(2**18, dtype=torch.int64, device=DEVICE), torch.zeros(1000, dtype=torch.int64).to(DEVICE)
    for value in (ids.float() + 1, *large, ids // 3, ids + 1.5):
        assert _trips_of(value.cpu)[0] == 1


@pytest.mark.parametrize("write", [
    lambda ids, step: ids.add_(step) + 1, lambda ids, step: ids[1:].mul_(2) + step, lambda ids, step: ids.view(3, 1),
], ids=["in place", "through a view", "in a result"])
@torch.no_grad()
def test_a_write_of_a_compiled_function_is_seen_each_time(write: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(write, backend="djinn")
    for step in range(4):
        here, there = torch.arange(3), torch.arange(3, device=DEVICE)
        results = write(here, torch.tensor(step)), compiled(there, torch.tensor(step, device=DEVICE))
        assert there.tolist() == here.tolist()
        for made in results:
            made.add_(1)
        assert there.tolist() == here.tolist()


@torch.no_grad()
def test_what_a_compiled_function_counts_leaves_other_values_known() -> None:
    """As the lengths of static caches: one is counted by the function, all are set back by recorded operations."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda counts, x: [x * count.add_(1) for count in counts], backend="djinn")
    counts = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2)]
    x, flags = torch.ones(3, device=DEVICE), torch.ones(3, dtype=torch.int64, device=DEVICE)
    compiled(counts, x)
    for count in counts:
        count.zero_()
    for _ in range(3):
        results = compiled(counts, x)
        assert _trips_of(lambda: bool((flags == 1).all())) == (0, True)
    views = [count.view(1) for count in counts]
    for known in (counts, views):
        assert [int(value) for value in known] == [3, 3]
    assert results[0].tolist() == [3.0] * 3


def test_a_wrong_call_raises_what_eager_raises() -> None:
    ids = torch.arange(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="index 9"):
        ids.gather(0, torch.tensor([9]).to(DEVICE)).tolist()
    assert ids.tolist() == [0, 1, 2, 3]


def test_the_answer_belongs_to_the_caller() -> None:
    ids = torch.arange(4, device=DEVICE)
    ids.cpu().zero_()
    ids.cpu().add_(3)
    assert ids.cpu().tolist() == [0, 1, 2, 3]


def test_many_steps_are_followed_without_being_kept() -> None:
    length = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for _ in range(1500):
        length = length + 1
    assert _trips_of(length.item) == (0, 1500)


def test_the_positions_of_a_batch_are_known_and_long_chains_of_large_values_are_not() -> None:
    positions = torch.arange(512, device=DEVICE).unsqueeze(0).expand(16, -1)

    def is_packed() -> bool:
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        return not bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())

    assert _trips_of(is_packed) == (0, False)
    counts = positions
    for _ in range(100):
        counts = counts + 1
    assert _trips_of(counts[0, 0].item) == (1, 100)


@pytest.fixture(params=["served", "in process"])
def _each_place(request: pytest.FixtureRequest) -> Iterator[None]:
    djinn.init(server=None if request.param == "served" else "")
    yield
    djinn.init()


@pytest.mark.usefixtures("_each_place")
def test_sizes_that_depend_on_uploads_cost_no_trip() -> None:
    ids, mask = torch.tensor([3, 1, 3]).to(DEVICE), torch.tensor([True, False, True]).to(DEVICE)
    values = torch.rand(3, device=DEVICE)
    trips, found = _trips_of(lambda: [part.tolist() for part in torch.unique(ids, return_counts=True)])
    assert (trips, found) == (0, [[1, 3], [1, 2]])
    trips, chosen = _trips_of(lambda: (values[mask], torch.masked_select(values, mask)))
    assert (trips, *(part.shape for part in chosen)) == (0, (2,), (2,))
    assert chosen[0].tolist() == chosen[1].tolist() == values.cpu()[[0, 2]].tolist()


_BY_MASKS: dict[str, Any] = {
    "rows": lambda x, rows, columns, counts: x[rows],
    "columns": lambda x, rows, columns, counts: x[:, columns],
    "of a transposed tensor": lambda x, rows, columns, counts: x.t()[columns],
    "both": lambda x, rows, columns, counts: x[rows[:, None] & columns, None],
    "with positions": lambda x, rows, columns, counts: x[counts[:2], columns],
    "assigned": lambda x, rows, columns, counts: x.index_put((rows,), x[rows] * 2),
    "selected": lambda x, rows, columns, counts: torch.masked_select(x, rows[:, None]),
    "repeated": lambda x, rows, columns, counts: x.repeat_interleave(counts, 0),
    "counted": lambda x, rows, columns, counts: torch.bincount(counts, minlength=5),
    "weighed": lambda x, rows, columns, counts: torch.bincount(counts, weights=x[:, 0]),
    "in a row": lambda x, rows, columns, counts: torch.unique_consecutive(counts, return_counts=True)[1],
    "unique rows": lambda x, rows, columns, counts: torch.unique(counts[None].expand(2, -1), dim=0),
    "one changed": lambda x, rows, columns, counts: (rows[1].fill_(True), x[rows])[1],
}


@pytest.mark.usefixtures("_each_place")
@pytest.mark.parametrize("chosen", _BY_MASKS.values(), ids=[*_BY_MASKS])
def test_what_uploaded_masks_and_counts_choose_costs_no_trip(chosen: Any) -> None:
    def made(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        given = (torch.rand(3, 4), torch.tensor([True, False, True]), torch.tensor([True, False, False, True]),
                 torch.tensor([1, 0, 2]))
        found: torch.Tensor = chosen(*(each.to(device) for each in given))
        return found

    trips, got = _trips_of(lambda: made(DEVICE))
    wanted = made("cpu")
    assert (trips, got.shape, got.stride()) == (0, wanted.shape, wanted.stride())
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("place", ["from here", "made there"])
def test_a_loop_over_elements_looks_at_no_value_again_and_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.randint(0, 3, (3, 3))
    index = here.to(DEVICE) if place == "from here" else here.to(DEVICE).float().add(0.5).long()
    looked: list[int] = []
    died = RememberedAnswers.died
    monkeypatch.setattr(RememberedAnswers, "died", lambda self, dead: (looked.extend(dead), died(self, looked[-1:])))
    made, source, wanted = torch.zeros(3, 3, device=DEVICE), torch.rand(3, 3, device=DEVICE), torch.zeros(3, 3)
    elements = [(row, column) for row in range(3) for column in range(3)]

    def add() -> None:
        for row, column in elements:
            made[(index[row, column], column)] += source[row, column]

    trips, _ = _trips_of(add)
    assert trips <= 2 * (place == "made there"), "one index, and then all"
    assert max(Counter(looked).values()) <= 2, "when it dies, and when it is freed"
    for row, column in elements:
        wanted[here[row, column], column] += source.cpu()[row, column]
    assert torch.equal(made.cpu(), wanted)


def test_a_repetition_of_given_length_asks_for_nothing() -> None:
    x, counts = torch.rand(3, device=DEVICE), torch.rand(3, device=DEVICE).add(1.0).long()
    trips, repeated = _trips_of(lambda: x.repeat_interleave(counts, output_size=3))
    assert (trips, repeated.tolist()) == (0, x.tolist())
    with pytest.raises(RuntimeError, match="size"):
        x.repeat_interleave(counts, output_size=5).tolist()


@pytest.mark.usefixtures("_each_place")
def test_one_trip_for_a_size_tells_what_it_depends_on() -> None:
    labels, values = torch.rand(5, device=DEVICE).add(1.0).long(), torch.rand(5, device=DEVICE)
    trips, is_wrong = _trips_of(lambda: bool((torch.unique(labels) != 1).any()))
    assert (trips, is_wrong) == (1, False)
    mask = values > 0.5
    trips, chosen = _trips_of(lambda: (values[mask], values.neg()[mask], mask.nonzero()))
    assert trips == 1
    here = values.cpu()
    assert [part.tolist() for part in chosen] == [
        part.tolist() for part in (here[here > 0.5], -here[here > 0.5], (here > 0.5).nonzero())]


@pytest.mark.parametrize("ask", [
    lambda values, mask: values[mask], lambda values, mask: values[:, mask[0]], lambda values, mask: values[mask[:, 0]],
    lambda values, mask: torch.masked_select(values, mask[0]), lambda values, mask: values[mask, None],
    lambda values, mask: torch.unique((values * 9).long(), sorted=False).sort().values,
], ids=["all", "columns", "rows", "broadcast", "with a dimension", "not sorted"])
def test_sizes_are_those_of_eager_for_each_mask(ask: Any) -> None:
    for mask in ([[True, False], [True, True]], [[False, False], [False, False]]):
        values, here = torch.rand(2, 2), torch.tensor(mask)
        got, wanted = ask(values.to(DEVICE), here.to(DEVICE)), ask(values, here)
        assert (got.shape, got.stride(), got.tolist()) == (wanted.shape, wanted.stride(), wanted.tolist())


def test_a_failure_comes_with_a_size_that_has_to_be_asked_for() -> None:
    values = torch.rand(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="singular"):
        _ = torch.linalg.inv(torch.zeros(2, 2, device=DEVICE)), values[values > 0.5]


def test_it_can_be_switched_off() -> None:
    djinn.init(server=djinn.ensure_initialized().config.server, known_value_bytes=0)
    assert _trips_of(torch.arange(3, device=DEVICE).tolist) == (1, [0, 1, 2])
    assert "answered_at_home" not in djinn.stats()
