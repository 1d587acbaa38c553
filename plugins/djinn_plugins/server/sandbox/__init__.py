"""The sandbox of workers: limits the damage that a compromised worker can do.

A worker gives up rights before it serves any client. `fence` sets the sandbox up with `privileges` (users,
capabilities, limits), `landlock` (files), and `seccomp` (system calls, listed in `calls`). All of these are kernel
features; nothing has to be installed.
"""
