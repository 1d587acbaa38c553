"""Classifies operators by their schemas and tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import Classifier


@hookimpl
def djinn_register_classifiers(register: Callable[[Classifier], None]) -> None:
    """Register the plugin's classifier."""
    from djinn_plugins.device.classifier.classifier import CoreClassifier

    register(CoreClassifier())
