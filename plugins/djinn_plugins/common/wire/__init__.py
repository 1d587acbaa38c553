"""How messages are framed and shortened, on top of `djinn.wire`."""
