"""Sparse tensors on a remote accelerator: their components travel, and the executor rebuilds them for each operation.

On the client, a sparse tensor is a `djinn_plugins.device.sparse.tensor.LazySparse` with lazy components. An operation
on it is recorded as one operator of the namespace ``djinn_sparse`` on these components. The executor checks them, makes
the sparse tensors, calls the kernel that eager calls, and returns the components of its result.
"""

from __future__ import annotations

# First, because `import djinn` sets up the device, for which its plugin needs modules of this package: whole ones.
import djinn  # noqa: F401  # imported for its effect
