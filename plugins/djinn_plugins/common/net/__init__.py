"""Addresses, listening sockets, and what is said to strangers."""
