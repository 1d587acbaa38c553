"""Checks answers of servers: their form against the batches that they answer, and their texts for a terminal."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Batch, Description, Failure, Plain, Poisoned, Result, TensorHeader, Warned
from djinn_plugins.common.device_report import FIRST_REPORT
from djinn_plugins.common.memory.tensor_bytes import check_layout
from djinn_plugins.common.net.terminal_text import harmless

__all__ = ("check_form", "checked")

def checked(batch: Batch, answer: tuple[Result, list[torch.Tensor]]) -> tuple[Result, list[torch.Tensor]]:
    """Return the answer to a batch, with harmless texts.

    Raises:
        ProtocolError: It is not an answer to what was asked.
    """
    result, tensors = answer
    if batch.fetch or batch.describe:
        # Without a question, the client looks at no values.
        check_form(batch, result, len(tensors))
    if not (result.failures or result.warnings):
        return answer
    failures, warnings = tuple(map(_harmless_failure, result.failures)), tuple(map(_harmless_warning, result.warnings))
    return msgspec.structs.replace(result, failures=failures, warnings=warnings), tensors


def check_form(batch: Batch, result: Result, tensors: int) -> None:
    """Check that a result has what a batch asks for, and as many tensors as it announces.

    Raises:
        ProtocolError: It has something else.
    """
    fetched, described = len(batch.fetch), len(batch.describe)
    if len(result.items) != fetched + described:
        raise ProtocolError(f"It answered {fetched + described} questions with {len(result.items)} values.")
    headers = 0
    for position, item in enumerate(result.items):
        kind = type(item)
        headers += kind is TensorHeader
        if kind is Plain:
            # The caller checks the form of a server's report about itself.
            if position >= fetched or batch.fetch[position] < FIRST_REPORT:
                if position < fetched and isinstance(item.value, list):  # type: ignore[union-attr]  # as below
                    raise ProtocolError("It sent a list where a number was expected.")
                _check_plain(item.value)  # type: ignore[union-attr]  # its class was compared
        elif kind is not Poisoned and kind is not (TensorHeader if position < fetched else Description):
            raise ProtocolError(f"It answered question {position} with a {kind.__name__}.")
        elif kind is Description:
            check_layout(*msgspec.structs.astuple(item))
    if headers != tensors:
        raise ProtocolError(f"It sent {tensors} tensors and announced {headers}.")


def _check_plain(value: Any) -> None:
    """Check that a value is nothing but numbers; see `djinn.wire.messages.to_wire`."""
    if isinstance(value, list):
        for each in value:
            _check_plain(each)
    elif not (value is None or isinstance(value, (bool, int, float)) or (
            isinstance(value, dict) and value.keys() == {"real", "imag"}
            and all(type(part) in (int, float) for part in value.values()))):
        raise ProtocolError(f"It sent a {type(value).__name__} where a number was expected.")


def _harmless_failure(failure: Failure) -> Failure:
    return msgspec.structs.replace(failure, message=harmless(failure.message), operator=harmless(failure.operator))


def _harmless_warning(warned: Warned) -> Warned:
    return Warned(warned.category, harmless(warned.text))
