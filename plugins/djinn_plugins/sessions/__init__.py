"""Sessions with names, sessions in event loops, and the names of the module `djinn`."""
