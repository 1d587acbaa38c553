"""The executor's side of a session, without sockets or processes.

It carries out the commands of a session, keeps its values, and exchanges values with other sessions.
"""
