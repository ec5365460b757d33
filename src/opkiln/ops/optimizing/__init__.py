"""Shared by the optimizers of the catalogue: groups, states, calls of their ops, references.

The optimizers themselves are in ``ops/<op>/optimizer.py``; ``opkiln.optim`` has their names.
"""
