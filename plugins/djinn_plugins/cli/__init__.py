"""The program ``djinn``: its own commands ``plugins`` and ``doctor``, and those that plugins add."""
