"""``opkiln doctor``: one function per check, one file per theme.

A check takes a ``Here`` (facts that several checks need, found out once) and returns an
``Outcome``. Checks do not import torch, change settings or leave files behind, except what probes
remember in the store. ``checks.examine`` runs them all.
"""
