"""``opkiln doctor``: one function per check, one file per theme.

A check takes a ``Facts`` (facts that several checks need, found out once) and returns an
``Diagnosis``. Checks do not import torch, change settings or leave files behind, except what probes
remember in the store. ``checks.examine`` runs them all.
"""
