"""The protocol without I/O: messages, frames, and how a server processes a message.

Transports move bytes and call these functions. Nothing here opens a socket or executes received data.
"""
