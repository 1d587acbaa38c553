"""Measurements on a GPU, for docs/cuda.md: one line of JSON each.

Usage: python tests/gpu/measure.py device|decode [DEVICE [MODEL]]. ``device`` does not import djinn; ``decode`` compares
transformers' ``generate`` on the device itself, in a process of its own, with a server's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

D = "remote_accelerator:0"
TOKENS, TURNS = 64, 3


def report(name: str, **found: Any) -> None:
    print(json.dumps({"measured": name, "torch": torch.__version__, **found}), flush=True)


def each_us(action: Callable[[], object], device: str, turns: int = 200) -> float:
    """Return the microseconds that the host needs for an action."""
    for _ in range(20):
        action()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(turns):
        action()
    spent = time.perf_counter() - begun
    _wait(device)
    return round(spent / turns * 1e6, 2)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def measure_device(device: str) -> None:
    """Measure what launches and replays of graphs cost the host, and how fast page-locked memory is copied."""
    x = torch.randn(64, 64, device=device)
    with torch.inference_mode():
        report("launch", device=device, add_us=each_us(lambda: x.add(1), device), mm_us=each_us(lambda: x @ x, device))
    if not device.startswith("cuda"):
        return
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        y = x
        for _ in range(64):
            y = y.add(1)
    report("replay of 64 kernels", device=torch.cuda.get_device_name(device), us=each_us(graph.replay, device))
    pinned, there = torch.empty(2**28, dtype=torch.uint8).pin_memory(), torch.empty(2**28, dtype=torch.uint8,
                                                                                   device=device)
    begun = time.perf_counter()
    for _ in range(8):
        there.copy_(pinned, non_blocking=True)
    _wait(device)
    report("upload of page-locked memory", gb_s=round(8 * 2**28 / (time.perf_counter() - begun) / 1e9, 1))


def model_of(size: str) -> Any:
    """Make a model with weights from a seed."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if size == "small":
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=200)).eval()
    if size == "gpt2":
        return GPT2LMHeadModel(GPT2Config()).eval().to(torch.bfloat16)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=32000)).eval().to(torch.bfloat16)


def decode_ms(model: Any, device: str) -> tuple[float, list[int]]:
    """Return the milliseconds of a token, the best of some turns, and the last tokens."""
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]], device=device)
    best, made = float("inf"), torch.zeros(0)
    for _ in range(TURNS + 1):
        begun = time.perf_counter()
        with torch.no_grad():
            made = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
                                  eos_token_id=None).cpu()
        best = min(best, time.perf_counter() - begun)
    return round(best / TOKENS * 1e3, 3), made[0, -4:].tolist()


def measure_decoding(device: str, size: str) -> None:
    """Measure tokens on the device itself and on a server."""
    local = subprocess.run([sys.executable, __file__, "local", device, size], capture_output=True, text=True,
                           check=True)
    wanted_ms, wanted = json.loads(local.stdout)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.servers.serving import Serving

    import djinn

    for overlaps in ("0", "1") if device.startswith("cuda") else ("0",):
        with tempfile.TemporaryDirectory() as folder, Serving(
                Path(folder) / "log", "--device", device, DJINN_CUDA_OVERLAP=overlaps) as server:
            djinn.init(server=server.address)
            found_ms, found = decode_ms(model_of(size).to(D), D)
            djinn.shutdown()
        report("decoding", device=device, model=size, graphs=overlaps == "1", local_ms=wanted_ms, djinn_ms=found_ms,
               same_tokens=found == wanted)


def main(what: str, device: str = "cuda:0", size: str = "gpt2") -> None:
    if what == "device":
        measure_device(device)
    elif what == "local":
        print(json.dumps(decode_ms(model_of(size).to(device), device)))
    elif what == "decode":
        measure_decoding(device, size)
    else:
        raise SystemExit(f"{what!r} is none of: device, decode")


if __name__ == "__main__":
    main(*sys.argv[1:])
