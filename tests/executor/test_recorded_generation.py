"""How much of a token of a language model a CUDA executor records, shown with the recorder for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.recording.believed_cuda import believed_cuda
from support.recording.cpu import CpuRecorder, RecordingExecutor

from djinn.ir.program import Program
from djinn.plugins import Plugins
from djinn_plugins.common.kinds.guard import Bounds, CallCheck
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.executor.cuda.recorded import RecordedProgram
from djinn_plugins.server.server import Server

DEVICE = "remote_accelerator:0"
LAYERS, TOKENS = 12, 16
"""The structure of a program does not depend on the width: these are the steps of GPT-2 124M."""
MOST_SINGLE_STEPS = 31
"""Of the 571 steps of a token that were counted when this limit was set; there are fewer now."""


class Executor(RecordingExecutor):
    """Records as on CUDA, only what is long enough, and keeps its programs."""

    def __init__(self) -> None:
        super().__init__(CpuRecorder(limit_bytes=2**30), limit=256)
        self.programs: list[tuple[Program, RecordedProgram]] = []

    def options(self, program: Program) -> dict[str, Any]:
        return {}

    def compile_checked(self, program: Program, checks: Any | dict[int, CallCheck]) -> RecordedProgram:
        self.programs.append((program, super().compile_checked(program, checks)))
        return self.programs[-1][1]


@pytest.fixture
def executor() -> Iterator[Executor]:
    """An executor that is served with a guard; its client takes it for a CUDA device, and sends a token at a time."""
    plugins, executor = Plugins.load(), Executor()
    watch = partial(plugins.choose("guard", "core").watch, Bounds("cpu", 2**30), plugins.choose("shapes", "meta"))
    listener = plugins.transport_for("tcp").listen("tcp://127.0.0.1:0", ListenOptions())
    with Server(listener, executor, admit=lambda channel, hello: None, watch=watch) as server, \
            believed_cuda(server=server.address, flush_every=None):
        yield executor


@pytest.mark.parametrize(("cache", "most_segments"), [("static", 3), ("dynamic", LAYERS + 1)])
def test_almost_all_steps_of_a_token_are_recorded(executor: Executor, cache: str, most_segments: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2)).eval()
    prompt = torch.arange(3, 11).unsqueeze(0)
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False,
                **({"cache_implementation": "static"} if cache == "static" else {})}
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    model, prompt = model.to(DEVICE), prompt.to(DEVICE)
    got = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert torch.equal(got.cpu(), wanted)
    played = {len(program.steps): [player.segment for player in made.segments if player.is_played]
              for program, made in executor.programs if made.segments}
    steps, segments = max(played.items())
    assert steps > 400
    assert 0 < len(segments) <= most_segments
    recorded = sum(segment.end - segment.begin for segment in segments)
    growing = 3 * LAYERS if cache == "dynamic" else 0
    assert recorded >= steps - growing - MOST_SINGLE_STEPS, [(one.begin, one.end) for one in segments]
