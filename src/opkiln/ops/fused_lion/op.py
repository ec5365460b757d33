"""The builder and the schemas of ``fused_lion``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.optimizing.builders import FusedBuilder, fused_schemas


class FusedLionBuilder(FusedBuilder):
    """``load()`` gives ``fused_lion_`` (see reference.py) and, on GPUs, its planned form."""

    NAME = "fused_lion"
    BUILD_VAR = "DS_BUILD_FUSED_LION"
    SCHEMAS = fused_schemas(
        "fused_lion",
        ("exp_avgs",),
        "float lr, float beta1, float beta2, float weight_decay, bool maximize",
    )
