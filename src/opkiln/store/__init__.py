"""Immutable, content-addressed entries in layers; a hit needs no lock, no compiler, no write."""
