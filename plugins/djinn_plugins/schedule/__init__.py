"""Library: what work costs, which rules a schedule keeps, and what follows from where operations run.

Schedulers use it. It checks their answers, runs schedules, measures executors, and explains all of that. No operation
passes through it.
"""
