"""Planning: what work costs, which rules a schedule keeps, and what follows from where the nodes are placed.

Nothing here is passed by an operation. Schedulers use it, and the kernel checks with it what schedulers answer.
"""
