"""Precompiled ops, for releases, container images and other people's packages."""
