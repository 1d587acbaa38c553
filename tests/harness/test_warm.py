"""Interpreters for programs of tests: which of them has djinn before its program begins."""

from __future__ import annotations

import pytest
from support.processes.warm import run_python

_TELLS = "import sys; print(*(name in sys.modules for name in ('torch', 'djinn_plugins.server.opening', 'djinn')))"


@pytest.mark.parametrize(("has_djinn", "environ", "said"), [
    (True, {}, "True True True"),
    (False, {}, "True False False"),
    # What `import djinn` does depends on these.
    (True, {"DJINN_PLUGINS": "-djinn-bench"}, "True False False"),
    (True, {"DJINN_RUN_AS": "accelerator"}, "True False False"),
], ids=str)
def test_djinn_is_there_if_it_is_wanted(has_djinn: bool, environ: dict[str, str], said: str) -> None:
    done = run_python(_TELLS, has_djinn=has_djinn, **environ)
    assert (done.stdout.strip(), done.stderr) == (said, "")
