"""Loads PyTorch's database of samples: for the interpreter that processes which run samples are forked from."""

from __future__ import annotations

from djinn_conformance.database import operators

operators()
