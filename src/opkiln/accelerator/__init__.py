"""The device that this process runs on, as one object that drives it.

``detect`` chooses it. ``interface`` has the class that all accelerators share, over ``device``.
opkiln's own accelerators are in ``cpu`` and ``mps`` (over ``one_device``), ``cuda`` (with ROCm),
``xpu`` and ``vendors``.
"""
