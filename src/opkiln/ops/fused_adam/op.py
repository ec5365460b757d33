"""The builder and the schemas of ``fused_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.optimizing.builders import FusedBuilder, fused_schemas


class FusedAdamBuilder(FusedBuilder):
    """``load()`` gives ``fused_adam_`` (see reference.py) and, on GPUs, its planned form."""

    NAME = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    SCHEMAS = fused_schemas(
        "fused_adam",
        ("exp_avgs", "exp_avg_sqs"),
        "float lr, float beta1, float beta2, float eps, float weight_decay, bool adamw_mode, "
        "bool bias_correction, bool maximize",
    )
