"""What a session with several executors has beside the link of a session with one.

A `djinn.fleet.fleet.Fleet` stands where the `djinn.link.Link` stands otherwise, and has one link per executor. It keeps
the books of where values are, lets a placement say where operations run, and moves what is needed elsewhere from server
to server.
"""
