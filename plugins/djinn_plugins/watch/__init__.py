"""What shows people what sessions and servers do."""
