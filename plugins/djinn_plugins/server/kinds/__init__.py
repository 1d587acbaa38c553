"""The kinds of plugin that belong to a server, one module each."""
