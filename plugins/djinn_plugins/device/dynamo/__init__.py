"""``torch.compile(model, backend="djinn")``: captured graphs run remotely, with ordinary tensors as inputs and results.

PyTorch finds the backend by the entry point ``djinn`` in its group ``torch_dynamo_backends``.
"""

from __future__ import annotations
