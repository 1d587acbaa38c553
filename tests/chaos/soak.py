"""Clients come and go against one server for a while, and it must not grow: ``python soak.py --minutes 5``.

They connect, generate, train, upload, crash in the middle of it, and connect again. What the server's processes hold is
written down every few seconds, each time when nobody is connected. At the end a line is laid through the samples of the
second half: its slope says whether anything grows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from support.servers.serving import Serving  # noqa: E402  # found only from here on

LANES = 2
"""Clients at a time."""
ROUND_S = 12.0
LEAST_SAMPLES = 4
REST_S = 1.5
MOST_PER_HOUR = {"resident_mib": 0.01, "descriptors": 0.0, "threads": 0.0}
"""Growth that is allowed, as a part of what there is; memory also may vary by what one sample does."""
MOST_NOISE_MIB = 2.0
"""Growth of memory over the whole second half that is not told from chance."""
CLIENTS = """
import os, random, signal, sys, threading, time, warnings
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
import djinn
warnings.simplefilter("ignore")
torch.set_num_threads(1)
address, seed, end_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
device = "remote_accelerator:0"
choose = random.Random(seed)

def generate():
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=200, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval().to(device)
    model.generate(torch.tensor([[1, 2, 3]]).to(device), max_new_tokens=20, pad_token_id=0, eos_token_id=None,
                   do_sample=choose.random() < 0.5).cpu()

def train():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 64).to(device)), torch.arange(8).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()

def upload():
    kept = [torch.randn(choose.randrange(1, 2**18)).to(device) for _ in range(20)]
    sum(value.sum() for value in kept).item()

def fail():
    try:
        torch.zeros(3, device=device)[torch.tensor([7]).to(device)].tolist()
    except IndexError:
        pass

def live(number):
    choose.seed(number)
    if choose.random() < 0.5:
        # This one crashes, in the middle of whatever it does.
        threading.Timer(choose.uniform(0.05, 1.5), os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(choose.randrange(1, 4)):
        djinn.init(server=address)
        for _ in range(choose.randrange(1, 4)):
            choose.choice([generate, train, upload, fail])()

until = time.monotonic() + end_s
number = seed
while time.monotonic() < until:
    # Each client is a process; forked, because PyTorch takes longer to import than most of them live.
    number += 1
    child = os.fork()
    if not child:
        try:
            live(number)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status not in (0, signal.SIGKILL):
        sys.exit(f"client {number} ended with {status}")
print(number - seed)
"""


@attrs.frozen
class Sample:
    """What the server's processes hold, together."""

    at_s: float
    resident_mib: float
    descriptors: int
    threads: int
    clients: int
    """How many have come so far."""

    @classmethod
    def of(cls, processes: Sequence[int], began: float, clients: int) -> Sample:
        pages = descriptors = threads = 0
        for process in processes:
            proc = Path("/proc") / str(process)
            pages += int((proc / "statm").read_text().split()[1])
            descriptors += len(list((proc / "fd").iterdir()))
            threads += len(list((proc / "task").iterdir()))
        return cls(time.monotonic() - began, pages * os.sysconf("SC_PAGESIZE") / 2**20, descriptors, threads, clients)


def disturb(server: Serving, seed: int) -> int:
    """Let clients come, work for a while, and leave or crash; return how many came.

    Raises:
        AssertionError: One failed.
    """
    running = [subprocess.Popen([sys.executable, "-c", CLIENTS, server.address, str(seed + lane * 10**6), str(ROUND_S)],
                                stdout=subprocess.PIPE, text=True) for lane in range(LANES)]
    told = [client.communicate()[0] for client in running]
    assert all(client.returncode == 0 for client in running), "a client failed"
    return sum(map(int, told))


def slope_per_hour(samples: Sequence[Sample], name: str) -> float:
    """How fast something grows, in parts of its mean."""
    values = [float(getattr(sample, name)) for sample in samples]
    slope = statistics.linear_regression([sample.at_s for sample in samples], values).slope
    return slope * 3600 / statistics.fmean(values)


def grown(samples: Sequence[Sample]) -> list[str]:
    """Say what grew in the second half of the samples; before that, things are made that are made once."""
    late = samples[len(samples) // 2:]
    found = []
    for name, most in MOST_PER_HOUR.items():
        slope = slope_per_hour(late, name)
        if slope <= most:
            continue
        mean = statistics.fmean(float(getattr(sample, name)) for sample in late)
        growth = slope / 3600 * (late[-1].at_s - late[0].at_s) * mean
        if name == "resident_mib" and growth < MOST_NOISE_MIB:
            continue
        if name != "resident_mib" and growth < 1:
            continue
        found.append(f"{name} grows by {growth:.1f} in {late[-1].at_s - late[0].at_s:.0f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Serving(
            Path(folder) / "log", "--isolate", "tenant", DJINN_LOG_LEVEL="WARNING") as server:
        began = time.monotonic()
        samples: list[Sample] = []
        clients = 0
        print(f"{'s':>6} {'MiB':>8} {'files':>6} {'threads':>8} {'clients':>8}")
        workers = server.workers
        while time.monotonic() - began < options.minutes * 60 or len(samples) < LEAST_SAMPLES:
            clients += disturb(server, options.seed + len(samples) * 1000)
            time.sleep(REST_S)
            sample = Sample.of([server.process.pid, *server.workers], began, clients)
            samples.append(sample)
            print(f"{sample.at_s:6.0f} {sample.resident_mib:8.1f} {sample.descriptors:6} {sample.threads:8} "
                  f"{sample.clients:8}", flush=True)
        assert server.workers == workers, "a worker died"
        log = server.log.read_text()
    for name in MOST_PER_HOUR:
        print(f"{name}: {slope_per_hour(samples[len(samples) // 2:], name):+.2%} an hour in the second half")
    found = grown(samples)
    if log:
        found.append(f"the server complained:\n{log[-4000:]}")
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
