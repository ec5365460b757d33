"""Layers and the pieces of layers. Importing this package is cheap: each name is imported when used."""

from __future__ import annotations
