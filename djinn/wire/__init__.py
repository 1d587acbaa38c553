"""The protocol without input or output: messages, frames, and what a server does with a message.

Transports move bytes and call these functions; nothing here opens a socket, and nothing here can execute what it reads.
"""
