"""Shared by the builders of the fused ops. Imports no torch: it is on the hit path."""

from __future__ import annotations

from collections.abc import Sequence

from opkiln.base.model import CUDA
from opkiln.builder import CUDAOpBuilder


class FusedBuilder(CUDAOpBuilder):
    """An op over lists of tensors, from ``ops/<name>``.

    Whatever may change between two replays of a captured graph is a tensor on the parameters'
    device.

    - ``masters`` is empty, or has an fp32 tensor per parameter, without elements if that parameter
      has no master.
    - ``steps`` is one tensor for all parameters, or one for each, no two of them the same.
      Parameters that have always been stepped together share one; others still go in the same call.
      The op adds 1 to each.
    - ``lr_tensor`` replaces ``lr``; ``grad_scale`` and ``found_inf`` are those of torch.amp.
      Clipping needs no argument of its own: its factor is part of ``grad_scale``.
    """

    BACKENDS = ("cuda", "rocm", "cpu")

    def sources(self) -> list[str]:
        return [f"ops/{self.NAME}/{'cpu.cpp' if self.build_for_cpu else 'cuda.cu'}"]

    def kernels(self) -> Sequence[str]:
        # A plan saves launches, and a CPU has no launches.
        return [f"{self.NAME}_"] if self.build_for_cpu else super().kernels()

    def nvcc_args(self) -> list[str]:
        # Division and root may be off by two units in the last place. They then have no branch for
        # special numbers, which takes registers. Their error affects only the change of a
        # parameter. -O is of the host's code, which makes checks and launches: optimizing it all
        # would take longer than compiling the kernels.
        if self.backend != CUDA:
            return []
        return ["-prec-div=false", "-prec-sqrt=false", "-O1"]
