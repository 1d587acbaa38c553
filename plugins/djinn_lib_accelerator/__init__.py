"""Library: whether and how the remote device stands in for an accelerator of this process.

It is no plugin and registers nothing.
"""
