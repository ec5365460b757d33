"""The library ``transformer_inference``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "transformer_inference",
    "norms.cpp",
    cuda=("norms.cu",),
    namespace="opkiln",
)
