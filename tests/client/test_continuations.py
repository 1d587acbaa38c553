"""Values requested at several places one after another come in one round trip: counted, over a guarded server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
import torch

import djinn

pytestmark = pytest.mark.usefixtures("on_a_server")
DEVICE = "remote_accelerator:0"
ROUNDS = 8


@pytest.fixture(autouse=True)
def _anew() -> None:
    # A server that answers before it is asked would hide what is counted here.
    djinn.init(early_answers=False)


def _trips_of_rounds(ask: Callable[[int], Any], rounds: int = ROUNDS) -> tuple[list[int], list[Any]]:
    trips, made = [], []
    for number in range(rounds):
        djinn.synchronize()
        djinn.reset_stats()
        made.append(ask(number))
        trips.append(djinn.stats()["round_trips"])
    return trips, made


def _is_odd(loss: torch.Tensor) -> bool:
    return bool(torch.isnan(loss)) or bool(torch.isinf(loss))


def test_two_questions_about_one_value_cost_one_round_trip_from_the_second_time_on() -> None:
    values = torch.tensor([1.0, torch.inf, 2.0, 0.0, torch.inf, 3.0, 4.0, 5.0])
    there = values.to(DEVICE)
    trips, odd = _trips_of_rounds(lambda number: _is_odd(there[number]))
    assert odd == [_is_odd(value) for value in values]
    assert trips == [2, 1, 1, 1, 1, 1, 1, 1]
    assert djinn.stats()["prefetched_unused"] == 0


def test_an_element_that_is_selected_by_the_number_just_waited_for_comes_with_it() -> None:
    rows = (torch.arange(ROUNDS * 5.0).reshape(ROUNDS, 5) * 7 + 3) % 23
    there = rows.to(DEVICE)

    def largest(number: int) -> float:
        row = there[number]
        # A tensor without dimensions is an index by its value, which is asked for; then the element is.
        return row[row.argmax()].item()

    trips, made = _trips_of_rounds(largest)
    assert made == rows.amax(1).tolist()
    assert len(set(rows.argmax(1).tolist())) > 2
    assert trips[2:] == [1] * (ROUNDS - 2)
    assert djinn.stats()["prefetched_unused"] == 0


def test_a_selection_is_as_eager_says_whatever_its_number_is_and_what_is_written_before() -> None:
    def run(device: str) -> list[Any]:
        made: list[Any] = []
        places = torch.tensor([3, 1, 2, -1, 9, 0, 4, 1, -5, 3]).to(device) * 1
        row = torch.tensor([5.0, 3.0, 8.0, 1.0, 9.0], device=device)
        for number in range(10):
            place = int(places[number])
            if number == 6:
                row.mul_(2)
            try:
                made.append((row[place] + 1).item())
            except IndexError:
                made.append("IndexError")
            made.append(row[number % 5].item())
        return made

    assert run(DEVICE) == run("cpu")
    assert djinn.stats()["prefetched"] > 0


def test_a_tensor_without_dimensions_that_is_indexed_by_a_mask_is_asked_for_with_the_mask() -> None:
    def scored(values: torch.Tensor) -> float:
        total = values.sum()
        score, is_large = torch.ones_like(total), total > 10
        score[is_large] = total[is_large] / 2
        score[total > 1000] = 0.0
        return score.item()

    values = torch.arange(ROUNDS * 3.0).reshape(ROUNDS, 3) + 5
    values[-2] = 0
    there = values.to(DEVICE)
    trips, made = _trips_of_rounds(lambda number: scored(there[number]))
    assert made == [scored(row) for row in values]
    assert trips[3:-2] == [1] * (ROUNDS - 5)


def test_zeros_that_were_written_are_positions_like_any_other() -> None:
    def run(device: str) -> list[Any]:
        row, steps, made = torch.arange(3.0, device=device), torch.tensor([0, 2, 1, 2, 7, 1]).to(device), list[Any]()
        for number in range(6):
            step = steps[number] * 1
            made.append((row + number).sum().item())
            place = torch.zeros(1, dtype=torch.int64, device=device)
            place += step
            try:
                made.append(row[place].item())
            except IndexError:
                made.append("IndexError")
        return made

    assert run(DEVICE) == run("cpu")


@pytest.mark.parametrize("write", [
    lambda x: x.mul_(2), lambda x: x.view(-1)[1:].zero_(), lambda x: x.data.add_(torch.ones(4)),
    lambda x: torch._foreach_add_([x], 1.0), lambda x: x.resize_(2, 2), lambda x: djinn.ensure_initialized().flush(),
], ids=["in place", "through a view", "from here", "list", "metadata", "nothing, but sent"])
def test_a_write_between_two_questions_is_seen(write: Any) -> None:
    def run(device: str) -> list[Any]:
        made: list[Any] = []
        for number in range(6):
            x = torch.arange(4.0, device=device) + number
            made.append(x.amax().item())
            if number % 3 == 2:
                write(x)
            made.append((x + 1).cpu())
            made.append(x.sum().item())
        return made

    djinn.reset_stats()
    for got, wanted in zip(run(DEVICE), run("cpu"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert djinn.stats()["prefetched"] > 0


def test_nothing_runs_ahead_that_could_fail() -> None:
    table = torch.arange(4.0, device=DEVICE).view(4, 1)

    def look_up(number: int) -> float | None:
        index = torch.tensor([number * 2]).to(DEVICE).float().long()
        if (index < 4).all():
            return torch.nn.functional.embedding(index, table).item()
        return None

    trips, found = _trips_of_rounds(look_up, 4)
    djinn.synchronize()
    assert (trips, found) == ([2, 2, 1, 1], [0.0, 2.0, None, None])


def test_a_failure_is_raised_at_the_wait_where_it_would_be_without() -> None:
    table = torch.ones(3, 1, device=DEVICE)

    def ask(number: int) -> Any:
        x = torch.full((2,), float(number), device=DEVICE)
        first = x.amax().item()
        lost = number == 3 and torch.nn.functional.embedding(torch.tensor([7]).to(DEVICE).float().long(), table)
        return first, x.amin().item(), lost

    assert [ask(number) for number in range(3)] == [(0, 0, False), (1, 1, False), (2, 2, False)]
    with pytest.raises(IndexError):
        ask(3)
    assert ask(4) == (4, 4, False)


def test_large_values_do_not_run_ahead() -> None:
    def ask(number: int) -> float:
        x = torch.full((2**15,), float(number), device=DEVICE)
        assert x.amax().item() == number
        return float((x + 1).cpu()[0])

    assert _trips_of_rounds(ask, 4) == ([2, 2, 2, 2], [1, 2, 3, 4])


@pytest.mark.parametrize("asks", [lambda number: number < 12, lambda number: number % 25 == 0], ids=["first", "rarely"])
def test_what_nobody_asks_for_is_tried_less_and_less(asks: Callable[[int], bool]) -> None:
    djinn.reset_stats()
    for number in range(150):
        x = torch.full((2,), float(number), device=DEVICE)
        assert x.amax().item() == number
        if asks(number):
            assert x.amin().item() == number
    djinn.synchronize()
    assert 0 < djinn.stats()["prefetched_unused"] <= 40


def test_a_value_that_every_fourth_round_asks_for_costs_no_round_trip() -> None:
    def ask(number: int) -> float:
        x = torch.full((2,), float(number), device=DEVICE)
        return float(x.amax()) + (float(x.amin()) if number % 4 == 0 else 0)

    assert _trips_of_rounds(ask, 16)[0] == [2] + 15 * [1]


def test_a_sum_that_is_written_between_two_questions_costs_no_round_trip() -> None:
    def rounds(device: str) -> tuple[list[int], list[Any]]:
        total = torch.zeros((), device=device)
        parts = torch.arange(64.0).view(ROUNDS, 8).to(device)

        def ask(number: int) -> tuple[bool, float, float]:
            part = parts[number] * 2
            is_odd = bool(part.isnan().any())
            total.add_(part.sum())
            mean = total.mean().item()
            total.sub_(total if number % 3 == 2 else 1)
            return is_odd, mean, torch.nn.utils.get_total_norm([part, part + 1]).item()

        return _trips_of_rounds(ask)

    (trips, made), (_, wanted) = rounds(DEVICE), rounds("cpu")
    assert made == wanted
    assert trips == [3, *trips[1:3], *(ROUNDS - 3) * [1]], "the sum is one value; the parts are new ones each time"


def test_a_copy_that_runs_ahead_writes_nothing_that_the_program_sees() -> None:
    def rounds(device: str) -> list[Any]:
        made: list[Any] = []
        for number in range(ROUNDS):
            x = torch.arange(4.0, device=device) + number
            other = x[1:] if number % 4 == 3 else x + 1
            made.append(x.amax().item())
            x.mul_(2)
            if number % 2:
                other.sub_(1)
            made += [x.sum().item(), other.sum().item()]
        return made

    djinn.reset_stats()
    assert rounds(DEVICE) == rounds("cpu")
    assert djinn.stats()["prefetched"] > 0


def test_a_value_that_has_died_is_never_used_again() -> None:
    def rounds(device: str) -> list[Any]:
        made: list[Any] = []
        weight = torch.ones(4, device=device)
        for number in range(2 * ROUNDS):
            if number % 5 == 4:
                weight = torch.full((4,), float(number), device=device)
                djinn.flush()
            x = torch.full((4,), float(number), device=device)
            made += [x.amax().item(), (weight + x).sum().item(), (weight * 2).sum().item()]
        return made

    djinn.reset_stats()
    assert rounds(DEVICE) == rounds("cpu")
    assert djinn.stats()["prefetched"] > ROUNDS


def test_large_gradients_are_measured_in_advance_only_after_much_more_work() -> None:
    weight = torch.ones(2**19, device=DEVICE)

    def ask(work: int, number: int) -> float:
        x = weight
        for _ in range(work):
            x = x * (number + 1.5)
        assert not x.isnan().any()
        return x.sum().item()

    little, _ = _trips_of_rounds(lambda number: ask(1, number), 4)
    much, _ = _trips_of_rounds(lambda number: ask(24, number), 4)
    assert (little, much) == ([2, 2, 2, 2], [2, 1, 1, 1])


@pytest.mark.usefixtures("without_collection")
def test_what_runs_ahead_is_no_operation_of_the_program_and_leaves_nothing() -> None:
    def steady(number: int) -> tuple[int, int]:
        x = torch.full((2,), float(number), device=DEVICE)
        bool(x.isnan().any())
        bool(x.isinf().any())
        del x
        djinn.synchronize()
        stats = djinn.stats()
        return stats["operations"], stats["live_handles"]

    counts = [steady(number) for number in range(ROUNDS)]
    done = [after[0] - before[0] for before, after in pairwise(counts)]
    assert len(set(done)) == 1
    assert len({handles for _, handles in counts}) == 1


def _model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=63)).eval()


class _Tokenizer:
    """Writes numbers instead of words."""

    def decode(self, numbers: list[int], **options: object) -> str:
        return "".join(f"{number} " for number in numbers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_a_thread", [False, True], ids=["TextStreamer", "TextIteratorStreamer"])
def test_a_streamer_costs_nothing(in_a_thread: bool, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokens = _model(), 12

    def generate(device: str) -> str:
        ids = torch.tensor([[3, 9, 5, 6, 7]]).to(device)
        kind = transformers.TextIteratorStreamer if in_a_thread else transformers.TextStreamer
        streamer = kind(_Tokenizer())
        options = {"streamer": streamer, "max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False,
                   "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        if not in_a_thread:
            model.generate(ids, **options)
            return capsys.readouterr().out
        thread = Thread(target=lambda: model.generate(ids, **options))
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    wanted = generate("cpu")
    model = model.to(DEVICE)
    trips, texts = _trips_of_rounds(lambda _: generate(DEVICE), 3)
    assert texts == [wanted] * 3
    # The first text also asks for shapes that nobody has seen.
    assert trips[1:] == [tokens, tokens], "one a token"


def _counted(model: Any, counts: Counter[str], name: str) -> Any:
    """Count the forward passes of a model that generates."""
    model.register_forward_hook(lambda *_: counts.update([name]))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("threshold", [0.4, 0.0], ids=["by probabilities", "by count"])
def test_assisted_decoding_asks_for_what_decides_it(threshold: float) -> None:
    counts: Counter[str] = Counter()
    model, assistant = _counted(_model(), counts, "checked"), _counted(_model(), counts, "drafted")
    assistant.generation_config.assistant_confidence_threshold = threshold

    def generate(device: str) -> Any:
        counts.clear()
        return model.generate(torch.tensor([[3, 9, 5, 6, 7]]).to(device), assistant_model=assistant, max_new_tokens=24,
                              do_sample=False, pad_token_id=0).tolist()

    wanted = generate("cpu")
    model, assistant = model.to(DEVICE), assistant.to(DEVICE)
    trips, made = _trips_of_rounds(lambda _: generate(DEVICE), 3)
    assert made == [wanted] * 3
    # A token of the assistant with its probability, that of each token of the draft, and the tokens that are right. The
    # rest is computed here. By count, only whether a token ends the text is asked.
    assert max(trips[1:]) <= (counts["drafted"] + 2 * counts["checked"] + 2 if threshold else counts["drafted"])
