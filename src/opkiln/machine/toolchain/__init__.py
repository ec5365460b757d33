"""Compilers: where they are, what they are, what they accept; one file per family."""
