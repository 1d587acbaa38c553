"""Library: Ctrl-C where it does no harm.

Transports and interceptors use it for their waits; it is no plugin and registers nothing.
"""
