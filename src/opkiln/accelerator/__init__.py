"""The device that this process runs on, as one object that drives it.

``detect`` chooses it. ``interface`` has the class that all accelerators share, over ``device``.
opkiln's own accelerators are in ``gpus`` and ``cpu``.
"""
