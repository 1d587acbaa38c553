"""The data model shared by the kernel, the plugins and the wire protocol."""
