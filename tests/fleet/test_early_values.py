"""Values that a server sends before it is asked, in sessions with two servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models.gpt2 import gpt2

import djinn

FIRST, SECOND = "remote_accelerator:0", "remote_accelerator:1"
MODEL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 63}
NEW, TRIES = 32, 12


@pytest.fixture
def addresses(start_server: Callable[..., Any]) -> Iterator[list[str]]:
    yield [start_server().address for _ in range(2)]
    djinn.shutdown()


def test_loops_that_one_server_has_and_loops_that_are_divided_are_answered_early(addresses: list[str]) -> None:
    prompt = torch.tensor([[3, 9, 5, 6]])
    wanted = generated(gpt2(**MODEL), prompt)
    waits = {}
    for answers_early in (False, True):
        djinn.init(servers=addresses, early_answers=answers_early)
        whole, split = gpt2(**MODEL).to(SECOND), divided(gpt2(**MODEL))
        for kind, model, device in (("split", split, FIRST), ("whole", whole, SECOND)):
            for _ in range(TRIES):
                djinn.synchronize()
                djinn.reset_stats()
                assert torch.equal(generated(model, prompt.to(device)).cpu(), wanted)
                stats = djinn.stats()
                waits[kind, answers_early] = stats["round_trips"]
                if not answers_early or stats["answered_early"] > NEW // 4:
                    break
            assert (stats["answered_early"] > 0) == answers_early
            assert (stats["transfers"] >= 2 * (NEW - 1)) == (kind == "split")
    # A token waits once, unless its value comes early.
    assert waits["split", False] >= NEW
    assert waits["whole", False] >= NEW
    assert waits["split", True] < waits["split", False]
    assert waits["whole", True] < waits["whole", False]


def generated(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                                            pad_token_id=0)
    return made


def divided(model: Any) -> Any:
    """Give the second half of a model to the second server."""

    def moved(value: Any, device: str) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    def arriving(_: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        return (tuple(moved(value, SECOND) for value in arguments),
                {name: moved(value, SECOND) for name, value in keywords.items()})

    def leaving(_: object, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(moved(value, FIRST) for value in arguments)

    model.to(FIRST)
    last = model.transformer.h[-1].to(SECOND)
    last.register_forward_pre_hook(arriving, with_kwargs=True)
    model.transformer.ln_f.register_forward_pre_hook(leaving)
    return model
