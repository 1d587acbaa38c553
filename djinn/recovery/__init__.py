"""Recovery: a session continues when its server dies.

A `djinn.recovery.recovering.Recovering` takes the place of the `djinn.link.Link` or `djinn.fleet.fleet.Fleet`, and
wraps one of these. It keeps a journal of the operations that produced every live value. When the server dies, it
recomputes these values on a new server and repeats the interrupted request.
"""
