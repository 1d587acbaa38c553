"""The sandbox of workers: what they give up before anybody speaks to them, so that one that is taken over harms nobody.

`fence` puts it up, of these means: `privileges` (users, capabilities, limits), `landlock` (files), and `seccomp`
(system calls, listed in `calls`). All of it is the kernel's; nothing has to be installed.
"""
