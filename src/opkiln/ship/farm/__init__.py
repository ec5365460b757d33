"""The build farm: ops and targets as tasks for any ``concurrent.futures.Executor``."""
