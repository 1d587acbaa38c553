"""Models of a server, loaded by name: no weight passes through the client."""
