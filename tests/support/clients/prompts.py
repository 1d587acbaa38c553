"""How long prompts take, and what they cost another client that writes: on one server, and with a second one for them.

Run as ``python -m support.clients.prompts``. It starts two servers with one thread each, which have a random GPT-2 in
their stores. Two clients read prompts alternately: one on the first server alone, one on both with
``placement="phases"``. At first, they are alone, and the second client assumes that the first server is busy. Then a
third client writes there all the time. Tokens are compared with those of eager PyTorch.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from support.models.gpt2 import gpt2
from support.servers.fleet import fleet_of

import djinn

MODEL = {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 5000, "n_positions": 1024}
PROMPT_TOKENS, NEW_TOKENS = 512, 8
WRITTEN_TOKENS = 400
"""Of each text that the writing client writes; then it begins another."""
PROMPTS = 4
"""Of each turn."""
TURNS = 8
BUSY = 0.99
DEVICE = "remote_accelerator:0"
_SERVE = "from djinn_plugins.cli.app import main; main()"


def stored() -> Any:
    """Return the model, with the weights of the session's server."""
    with torch.device("meta"):
        model = gpt2(**MODEL)
    model.load_state_dict(djinn.models.load("gpt"), strict=False, assign=True)
    model.tie_weights()
    return model


def written(model: Any, prompt: torch.Tensor, tokens: int) -> Iterator[int]:
    """Write greedily, token by token."""
    cache, last = None, prompt
    for _ in range(tokens):
        answer = model(last, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, last = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
        yield int(last.item())


def prompt_of(number: int, length: int) -> torch.Tensor:
    return torch.randint(MODEL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(number))


def write(server: str) -> None:
    """Write until the input ends, and print when each token was there."""
    djinn.init(server)
    model, number = stored(), 10**6
    print("ready", flush=True)
    with torch.inference_mode():
        while True:
            for _ in written(model, prompt_of(number, 16).to(DEVICE), WRITTEN_TOKENS):
                print(time.monotonic(), flush=True)
            number += 1


def read(servers: str) -> None:
    """Read prompts for each line of the input, and print how long that took."""
    addresses = servers.split(",")
    placing = {"placement": "phases"} if len(addresses) > 1 else {}
    session = djinn.init(servers=addresses, recovery="none", **placing)
    model, local, number = stored(), gpt2(**MODEL), 0
    print("ready", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            if placing:
                loads = fleet_of(session)._loads
                loads._are_read = line == "go\n"
                loads._loads = loads._loads if loads._are_read else [BUSY, 0.0]
            turn: dict[str, Any] = {"begin": time.monotonic(), "first": [], "total": []}
            texts = []
            for _ in range(PROMPTS):
                number += 1
                began = time.monotonic()
                tokens = written(model, prompt_of(number, PROMPT_TOKENS).to(DEVICE), NEW_TOKENS)
                text = [next(tokens)]
                turn["first"].append(time.monotonic() - began)
                text += tokens
                turn["total"].append(time.monotonic() - began)
                texts.append(text)
            turn["end"], turn["moved"] = time.monotonic(), djinn.stats().get("bytes_transferred", 0)
            print(json.dumps(turn), flush=True)
            if number == PROMPTS:
                assert texts[-1] == [*written(local, prompt_of(number, PROMPT_TOKENS), NEW_TOKENS)]


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it has ended"
    return line


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times) if begin <= earlier and later <= end]


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ms"


Turns = dict[str, list[dict[str, Any]]]


def alternating(readers: dict[str, subprocess.Popen[str]], line: str) -> Turns:
    """Let clients read prompts in turns, of which the first one does not count."""
    turns: Turns = {name: [] for name in readers}
    for _ in range(TURNS + 1):
        for name, reader in readers.items():
            assert reader.stdin is not None
            reader.stdin.write(line)
            reader.stdin.flush()
            turns[name].append(json.loads(line_of(reader)))
    return turns


def measured() -> tuple[list[float], tuple[float, float], Turns, Turns]:
    """Return when the writing client's tokens were there; from when to when nobody read; turns without and with it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gpt2(**MODEL).save_pretrained(folder / "gpt")
        serve = ("-c", _SERVE, "serve", "--device", "cpu", "--threads", "1", "--drain-s", "0", "--models", str(folder))
        servers = [line_of(stack.enter_context(started(*serve))).split()[-1] for _ in range(2)]
        module = ("-m", "support.clients.prompts")
        readers = {f"{count} server{'s' * (count > 1)}": stack.enter_context(
            started(*module, "read", ",".join(servers[:count]))) for count in (1, 2)}
        for reader in readers.values():
            assert line_of(reader) == "ready\n"
        alone = alternating(readers, "busy\n")
        log = stack.enter_context((folder / "times").open("w+"))
        writer = subprocess.Popen([sys.executable, *module, "write", servers[0]], stdout=log, text=True)
        stack.callback(writer.wait)
        stack.callback(writer.terminate)
        while not (folder / "times").stat().st_size:
            time.sleep(0.1)
        began = time.monotonic()
        time.sleep(5)
        quiet = began + 1, time.monotonic()
        turns = alternating(readers, "go\n")
        log.seek(0)
        return [float(line) for line in log.read().split("\n")[1:-1]], quiet, alone, turns


def main() -> None:
    times, quiet, alone, turns = measured()
    for name, taken in (*alone.items(), *turns.items()):
        if taken is turns["1 server"]:
            print("with another client that writes, a token each", milliseconds(gaps(times, *quiet)))
        first, total = ([statistics.median(turn[what]) for turn in taken[1:]] for what in ("first", "total"))
        moved = (taken[-1]["moved"] - taken[0]["moved"]) / TURNS / PROMPTS / 1e6
        print(f"{name}: first token {milliseconds(first)}, all {milliseconds(total)}, {moved:.1f} MB moved a prompt")
        if taken in turns.values():
            between = [gaps(times, turn["begin"], turn["end"]) for turn in taken[1:]]
            rate = sum(map(len, between)) / sum(turn["end"] - turn["begin"] for turn in taken[1:])
            print("    the other client's tokens:", milliseconds(list(map(statistics.median, between))),
                  f"apart, longest {milliseconds(list(map(max, between)))}, {rate:.1f} a second")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 1 else main()
