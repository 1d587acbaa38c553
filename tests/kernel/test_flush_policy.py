"""The pace of handing over: short after a wait, longer and longer then, and cut at the same places of a loop."""

from __future__ import annotations

import random
from typing import Any

from djinn.ir.flush_policy import MAX_PIECE, AdaptiveFlush
from djinn.ir.tape import Node, Signature


def nodes_of(numbers: list[int]) -> list[Node]:
    template: Any = None
    return [Node(Signature(template, number, (), (), (), False, ()), (), (), ()) for number in numbers]


def pieces(pace: AdaptiveFlush, numbers: list[int]) -> list[list[int]]:
    """Record operations with these templates, and hand over as a session does."""
    made, pending = [], list[Node]()
    for node in nodes_of(numbers):
        pending.append(node)
        if len(pending) >= pace.limit and pace.is_due(pending):
            made.append([one.signature.template_number for one in pending])
            pending = []
            pace.sent()
    return made


def test_a_fixed_pace_is_kept_to_the_operation() -> None:
    pace = AdaptiveFlush(7, is_fixed=True)
    assert [len(piece) for piece in pieces(pace, [number * 31 % 17 for number in range(70)])] == [7] * 10


def test_nothing_is_handed_over_early_without_a_pace() -> None:
    assert pieces(AdaptiveFlush(0, is_fixed=False), list(range(5000))) == []


def test_pieces_grow_until_somebody_waits() -> None:
    pace = AdaptiveFlush(8, is_fixed=False)
    lengths = [len(piece) for piece in pieces(pace, [number * 31 % 97 for number in range(20_000)])]
    assert all(low <= length <= 2 * low for low, length in zip((8, 32, 128, 512), lengths, strict=False))
    assert max(lengths) <= 2 * MAX_PIECE
    pace.waited()
    assert pace.limit == 8


def test_a_piece_ends_somewhere_even_if_its_content_never_says_so() -> None:
    assert {len(piece) for piece in pieces(AdaptiveFlush(2048, is_fixed=False), [5] * 50_000)} <= {2048, 4096}


def test_pieces_of_a_loop_are_few_wherever_it_was_entered() -> None:
    choose = random.Random(0)
    round_of_the_loop = [choose.randrange(200) for _ in range(3001)]

    def later_pieces(pace: AdaptiveFlush, offset: int) -> set[tuple[int, ...]]:
        made = pieces(pace, (round_of_the_loop * 60)[offset:])
        return {tuple(piece) for piece in made[len(made) // 2:]}

    for offset in (0, 1, 517, 1499):
        assert len(later_pieces(AdaptiveFlush(8, is_fixed=False), offset)) <= 12
        assert len(later_pieces(AdaptiveFlush(1024, is_fixed=True), offset)) > 50


def test_a_loop_that_never_waits_is_one_piece_again_and_again() -> None:
    layers = [1000 + number for number in range(35)] * 12
    loop = [*layers, *range(2000, 2049)]
    made = pieces(AdaptiveFlush(8, is_fixed=False), [*range(300), *loop * 60])
    later = {tuple(piece) for piece in made[len(made) // 2:]}
    assert len(later) == 1
    assert len(later.pop()) % len(loop) == 0
