"""Planning: the cost of work, the rules for schedules, and what follows from the placement of nodes.

Operations do not pass through this package. Schedulers use it, and the kernel uses it to check their results.
"""
