"""The devices of this machine, found without a device context and without torch.

``nvidia`` and ``amd`` list GPUs, ``nvidia_driver`` asks NVIDIA's driver. ``choice`` holds the kind
of device that the user requested, and looks for packages that drive devices.
"""
