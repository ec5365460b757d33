"""Immutable, content-addressed entries in layers. A hit needs no lock, no compiler and no write."""
