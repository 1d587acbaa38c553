"""``torch.compile(model, backend="djinn")``: what Dynamo captures runs remotely; ordinary tensors go in and come out.

PyTorch finds the backend by the entry point ``djinn`` of its group ``torch_dynamo_backends``.
"""

from __future__ import annotations
