"""What several rooms need; it imports only the kernel."""

from __future__ import annotations

# First, because `import djinn` sets up the device, for which its plugin needs modules of this package: whole ones.
import djinn  # noqa: F401  # imported for its effect
