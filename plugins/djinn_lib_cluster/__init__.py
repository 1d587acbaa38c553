"""Clusters of servers: what engines run, and where the records of a cluster are."""
