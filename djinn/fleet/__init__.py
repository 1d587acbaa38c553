"""Support for sessions with several executors.

A `djinn.fleet.fleet.Fleet` takes the place of the `djinn.link.Link`, and has one link per executor. It tracks where
values are, lets a placement decide where operations run, and moves values between servers as needed.
"""
