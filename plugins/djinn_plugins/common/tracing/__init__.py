"""Library: spans of time on the way of operations, and connections that measure them."""
