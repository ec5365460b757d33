"""The engine: runs a plan's steps in parallel within one budget, and says what it is doing.

``schedule.execute`` runs the steps, ``budget`` bounds them by the CPUs and the memory that all of
this user's builds on this host share, ``events`` carries what happens to ``progress`` (people) and
``chrome`` (a trace file).
"""
