"""Ways to generate that are measured and counted over a long distance, with the model of `support.models.gpt2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

__all__ = ("MODES", "Mode", "generated")

_PROMPT = ((464, 3290, 318, 257, 845, 922, 3290, 13), (0, 0, 0, 257, 845, 922, 3290, 11), (0, 0, 0, 0, 0, 922, 318, 13))
"""Rows of different lengths, padded on the left with zeros."""
_SEED = 3


@attrs.frozen
class Mode:
    """A way to generate.

    Attributes:
        tokens: How many tokens are generated.
        rows: Size of the batch; from the second row on, the prompt is padded.
        is_streamed: Whether each token is read as soon as it exists.
        options: What ``generate`` is given.
    """

    tokens: int = 32
    rows: int = 1
    is_streamed: bool = False
    options: Mapping[str, Any] = attrs.field(factory=dict)


MODES: Mapping[str, Mode] = {
    "greedy": Mode(),
    "long": Mode(tokens=128),
    "sampled": Mode(options={"do_sample": True}),
    "padded": Mode(rows=3),
    "streamed": Mode(is_streamed=True),
    "static": Mode(options={"cache_implementation": "static"}),
    "beams": Mode(options={"num_beams": 2}),
}


class _Streamer:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.cpu().reshape(-1))

    def end(self) -> None:
        pass


def generated(model: Any, device: str, mode: Mode) -> torch.Tensor:
    """Generate, and bring home the tokens, and those that the streamer saw.

    Any token may be the last one, so the loop reads a flag in each round, but none is.
    """
    ids = torch.tensor(_PROMPT[:mode.rows])
    ids, mask = ids % model.config.vocab_size, (ids != 0).long()
    streamer = _Streamer() if mode.is_streamed else None
    torch.manual_seed(_SEED)
    made: torch.Tensor = model.generate(
        ids.to(device), attention_mask=mask.to(device), max_new_tokens=mode.tokens, pad_token_id=0,
        eos_token_id=model.config.vocab_size - 1, streamer=streamer, **{"do_sample": False, **mode.options}).cpu()
    assert made.shape[1] == ids.shape[1] + mode.tokens
    return made if streamer is None else torch.cat([made[0], *streamer.seen])
