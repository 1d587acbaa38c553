"""Releases of PyTorch that lack what the device is made of are refused when djinn is imported."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch.utils.backend_registration
from support.processes.warm import run_python

import djinn_plugins.device.interceptor
from djinn.errors import UnsupportedTorchError
from djinn_plugins.device.interceptor.requirements import FIRST_RELEASE

SETUP = "_setup_privateuseone_for_python_backend"
# What PyTorch 2.9 lacks.
PROGRAM = f"""
import torch.utils.backend_registration as registration
del registration.{SETUP}
try:
    import djinn
except ImportError as error:
    print(error)
"""


def test_a_release_without_python_backends_is_refused_by_name_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils.backend_registration, SETUP)
    with pytest.raises(UnsupportedTorchError, match=rf"PyTorch {torch.__version__[:4]}.* lacks .*{SETUP}: .*install"):
        djinn_plugins.device.interceptor.djinn_register_interceptors(lambda _: None)


def test_the_import_itself_is_refused() -> None:
    done = run_python(PROGRAM)
    assert done.stdout.startswith("[DJ206] PyTorch "), done.stderr
    assert f"'torch>={FIRST_RELEASE}'" in done.stdout


def test_the_package_asks_for_the_release_that_the_remedy_names() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"torch>={FIRST_RELEASE}" in project["project"]["dependencies"]
