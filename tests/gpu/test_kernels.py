"""The executor's own operators equal local PyTorch bit for bit, on a GPU where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("program", ["attention_program.py", "recurrent_program.py"])
def test_operators_equal_local_pytorch(program: str, device: str) -> None:
    done = subprocess.run([sys.executable, str(Path(__file__).with_name(program)), device], capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
