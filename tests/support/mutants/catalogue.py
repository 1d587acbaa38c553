"""All mutants."""

from __future__ import annotations

from support.mutants import handing_over, recording, running

MUTANTS = (*recording.MUTANTS, *handing_over.MUTANTS, *running.MUTANTS)
