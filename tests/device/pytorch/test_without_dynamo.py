"""Nothing that djinn does by itself imports ``torch._dynamo``, which takes more than a second."""

from __future__ import annotations

import subprocess
import sys

_MODEL = """
import sys
import torch
import djinn

def check(when):
    assert 'torch._dynamo' not in sys.modules, when

check('import djinn')
x = torch.ones(2, 4, device='remote_accelerator:0')
(x + 1).sum().item()
check('the first operation')
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Dropout(0.5),
                            torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).to('remote_accelerator:0')
check('a model')
loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(2, dtype=torch.int64, device='remote_accelerator:0'))
check('its forward pass')
loss.backward()
loss.item()
check('its backward pass')
with torch.no_grad():
    for parameter in model.parameters():
        parameter.sub_(parameter.grad, alpha=0.1).clamp_(-1, 1)
    (model(x)[0] * 2).pow(2).mean().item()
check('a step')
"""
_LATER = """
import torch
import djinn
from djinn_plugins.device.shapes import without_dynamo

plain = next(without_dynamo.unmarked([torch._refs.add]))
x = torch.ones(2, 4, device='remote_accelerator:0')
(x + 1).sum().item()
early = getattr(plain, '__dynamo_disable')
import torch._dynamo
(x.double() + 1).sum().item()
marked = getattr(plain, '__dynamo_disable')
assert marked is not early and marked._torchdynamo_disable, marked
print(torch.compile(lambda a: a + 1, backend='eager')(torch.ones(1)).item())
"""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_model_trains_without_dynamo() -> None:
    _run(_MODEL)


def test_kernels_are_marked_when_dynamo_is_there() -> None:
    assert _run(_LATER) == "2.0\n"
