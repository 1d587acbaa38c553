"""Operators that do, without harm, what kernels may do wrong: a test gives them to a server as a plugin.

A client can call them only on a server that was started with ``--allow-namespace djinn_stand_in``.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAMESPACE = "djinn_stand_in"


def installed(folder: Path) -> str:
    """Install this module as a plugin, and return the folder that a server has to find on its path."""
    metadata = folder / "stand_ins-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stand_ins\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[djinn]\nstand_ins = stand_ins\n")
    shutil.copy(__file__, folder / "stand_ins.py")
    return str(folder)


def _ends(operand: torch.Tensor) -> torch.Tensor:
    """End the process, as a fault of a kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return operand.clone()


OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ends": ("(Tensor x) -> Tensor", _ends),
    "right": ("(Tensor x) -> Tensor", torch.clone),
    "view": ("(Tensor(a) x) -> Tensor(a)", lambda x: x.view_as(x)),
    "sparse": ("(Tensor x) -> Tensor", lambda x: x.to_sparse()),
    "sparse_of_two": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.to_sparse())),
    "quantized": ("(Tensor x) -> Tensor", lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)),
    "same": ("(Tensor x) -> Tensor", lambda x: x),
    "part": ("(Tensor x) -> Tensor", lambda x: x[1:]),
    "second_of_list": ("(Tensor[] x) -> Tensor[]", lambda x: [x[0] + 1, x[1]]),
}
_library = torch.library.Library(NAMESPACE, "DEF")
for _name, (_schema, _function) in OPERATORS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
