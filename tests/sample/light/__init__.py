"""A package with an op that is written with op.h."""
