"""Layers of a session, and the client's ends of what it agrees on with a server."""
