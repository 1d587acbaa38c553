"""GPT-2 124M with random weights, and what is generated with it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 32
PROMPT = torch.tensor([[464, 3290, 318, 257, 845, 922, 3290, 13]])


def gpt2(**config: Any) -> GPT2LMHeadModel:
    """Make the model; it has the size of GPT-2 124M unless told otherwise."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**config)).eval()


def generated(model: GPT2LMHeadModel, prompt: torch.Tensor, tokens: int = TOKENS, **options: Any) -> torch.Tensor:
    """Generate so many tokens greedily, and bring them home."""
    with torch.no_grad():
        made: torch.Tensor = model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
                                            eos_token_id=None, **options).cpu()
    return made
