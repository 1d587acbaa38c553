"""Library of the parts of a server that plugins provide: their Protocols, the server's options, and its limits."""
