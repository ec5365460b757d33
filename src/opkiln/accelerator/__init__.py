"""The device that this process runs on: found without touching it, and driven.

``detect`` finds it; ``base`` is the interface, a theme per file. Each accelerator has a file of its
own, and so has each way of asking a driver (``nvidia``, ``nvml``, ``nvidia_smi``, ``amd``).
"""
