"""What a session has beside that goes on when its server dies.

A `djinn.recovery.recovering.Recovering` stands where the `djinn.link.Link` or the `djinn.fleet.fleet.Fleet` stands
otherwise, and has one of these below it. It writes a journal of how every value that somebody still names came to be.
When the server dies, it makes the same values again on a new one and carries out what was asked for.
"""
