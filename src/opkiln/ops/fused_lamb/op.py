"""The library of ``fused_lamb``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.optimizing.builders import FusedBuilder


class FusedLambBuilder(FusedBuilder):
    NAME = "fused_lamb"
    BUILD_VAR = "DS_BUILD_FUSED_LAMB"


kit = library(FusedLambBuilder, functions="opkiln.ops.fused_lamb.functions")
