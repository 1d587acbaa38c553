"""The executor's own operators equal local PyTorch bit for bit, on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes.warm import run_script

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("program", ["attention_program.py", "recurrent_program.py"])
def test_operators_equal_local_pytorch(program: str, device: str) -> None:
    done = run_script(Path(__file__).with_name(program), device, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
