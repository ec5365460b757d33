"""Precompiled ops: what a release, an image or a package of somebody else carries."""
