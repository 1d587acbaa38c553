"""Connections between sessions and executors."""
