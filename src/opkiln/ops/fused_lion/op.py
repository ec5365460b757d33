"""The library of ``fused_lion``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.optimizing.builders import FusedBuilder


class FusedLionBuilder(FusedBuilder):
    NAME = "fused_lion"
    BUILD_VAR = "DS_BUILD_FUSED_LION"


kit = library(FusedLionBuilder, functions="opkiln.ops.fused_lion.functions")
