"""``opkiln doctor``: one function per check, one file per theme.

A check takes ``Facts``, which are found out once for all checks, and returns a ``Diagnosis``.
Checks do not import torch, change settings or leave files behind, except what probes remember in
the store. ``checks.examine`` runs them all.
"""
