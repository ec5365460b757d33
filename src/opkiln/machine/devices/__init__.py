"""The devices of this machine, found without a device context and without torch.

``nvidia`` and ``amd`` list GPUs, ``nvidia_driver`` asks NVIDIA's driver, ``installed`` looks for
packages that drive devices. ``choice`` holds the kind of device that the user requested.
"""
