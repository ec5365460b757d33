"""Decides what serves an op here, and why: ``decide.decide``."""
