"""Named sessions: ``djinn.kept``, the values that are still there when another process opens the session."""
