"""Library: the executor's side of a session, without sockets or processes.

It carries out the commands of a session, keeps its values, and exchanges values with other sessions. Servers and
transports compose it; it is no plugin and registers nothing.
"""

from __future__ import annotations

# First, because `import djinn` sets up the device, for which its plugin needs modules of this package: whole ones.
import djinn  # noqa: F401  # imported for its effect
