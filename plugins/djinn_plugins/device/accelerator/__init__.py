"""Library: whether the remote device is the accelerator of this process.

It is no plugin and registers nothing.
"""
