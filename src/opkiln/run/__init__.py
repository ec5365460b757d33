"""The engine: runs a plan's steps in parallel within one budget, and reports progress.

``schedule.execute`` runs the steps. ``budget`` limits them to the CPUs and the memory that all of
this user's builds on this host share. ``events`` reports what happens to ``progress`` (for people)
and ``chrome`` (a trace file).
"""
