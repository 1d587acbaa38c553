"""All tests look as thoroughly as the conformance suites do: ``HYPOTHESIS_PROFILE`` says how, if it is set."""

from __future__ import annotations

import os

from djinn_conformance.laws import active_profile
from hypothesis import settings

if os.environ.get("HYPOTHESIS_PROFILE"):
    settings.register_profile("chosen", active_profile())
    settings.load_profile("chosen")
