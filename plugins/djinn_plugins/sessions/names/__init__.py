"""The names of the module ``djinn`` that libraries provide, and those that documents of earlier versions use.

The kernel has no table of them: it asks `djinn_plugins.sessions.names.table` for a name that it does not have itself,
and `djinn_plugins.sessions.names.finder` for a module such as ``djinn.core.lazy_tensor``.
"""
