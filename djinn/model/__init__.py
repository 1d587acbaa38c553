"""The data model: what the kernel, the plugins and the wire talk about."""
