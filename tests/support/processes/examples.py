"""What Hypothesis does once in a process, done before the process is forked."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

__all__ = ("prepare",)


@settings(max_examples=200, derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
@given(st.integers() | st.floats() | st.text() | st.binary())
def prepare(_: object) -> None:
    """Draw values of all kinds.

    Before its first example, Hypothesis reads the sources of all modules that are loaded, for constants to draw. That
    takes a second, and many times as long in a checkout where it has never run.
    """
