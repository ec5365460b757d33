"""The library of ``fused_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.optimizing.builders import FusedBuilder


class FusedAdamBuilder(FusedBuilder):
    NAME = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"


kit = library(FusedAdamBuilder, functions="opkiln.ops.fused_adam.functions")
