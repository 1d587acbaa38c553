"""Packed sequences: their data is remote, their batch sizes are local, as with any accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from djinn.record.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.session.session import Session


def pack_padded(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack ``input`` by gathering its steps; the number of sequences per step depends only on ``lengths``.

    Source:
        ``_pack_padded_sequence`` of aten/src/ATen/native/PackedSequence.cpp.
    """
    sequence, lengths, *rest = args
    batch_first = rest[0] if rest else kwargs["batch_first"]
    if isinstance(lengths, LazyTensor):
        lengths = session.materialize([lengths])[0]
    steps = sequence.transpose(0, 1) if batch_first else sequence
    # The data of this stand-in is the position of each element; running the operator here also checks the arguments.
    positions = torch.arange(steps.shape[0] * steps.shape[1]).reshape(steps.shape[0], steps.shape[1], 1)
    chosen, batch_sizes = operator(positions.transpose(0, 1) if batch_first else positions, lengths, batch_first)
    return steps.flatten(0, 1).index_select(0, session.upload(chosen.flatten())), batch_sizes
