"""``opkiln doctor``: one function per check, one file per theme.

A check takes a ``Here`` (what several of them ask, asked once) and gives an ``Outcome``. None of
them imports torch, changes a setting or leaves a file behind, but for what probes remember in the
store. ``checks.examine`` runs them all.
"""
