"""Calls of operators: their arguments, checks, results and writes."""
