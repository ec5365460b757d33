"""The catalogue, one folder for each op. What ``op.py`` imports is on the way to a hit: no torch."""
