"""Accelerator: what device-neutral code talks to; every theme in one object.

The method names are those of DeepSpeed's accelerators, so that code written against one runs. Each
theme is a class of its own, in a file of its own; what they do goes through the device's module of
torch, so a concrete accelerator holds what differs and nothing else.

Another package adds one with an entry point:

    [project.entry-points."opkiln.accelerators"]
    mydevice = "my_package.accelerator:MyAccelerator"
"""

from __future__ import annotations

from opkiln.accelerator.builders import Builders
from opkiln.accelerator.compilation import Compilation
from opkiln.accelerator.dtypes import Dtypes
from opkiln.accelerator.environment import Environment
from opkiln.accelerator.graphs import Graphs
from opkiln.accelerator.memory import Memory
from opkiln.accelerator.profiling import Profiling
from opkiln.accelerator.rng import Rng
from opkiln.accelerator.streams import Streams
from opkiln.accelerator.tensors import Tensors


class Accelerator(
    Memory,
    Rng,
    Streams,
    Dtypes,
    Graphs,
    Tensors,
    Profiling,
    Builders,
    Environment,
    Compilation,
):
    """What others subclass. ``name``, ``device_type`` and ``look()`` at least."""
