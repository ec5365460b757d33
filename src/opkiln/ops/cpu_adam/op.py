"""The builder and the schemas of ``cpu_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.optimizing.builders import HostBuilder, host_schemas


class CPUAdamBuilder(HostBuilder):
    """``load()`` gives ``cpu_adam_`` and ``cpu_adam_rollback_``, see reference.py for both, and the
    form of the first over kept lists."""

    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    SCHEMAS = host_schemas(
        "cpu_adam",
        ("exp_avgs", "exp_avg_sqs"),
        "int step, float lr, float beta1, float beta2, float eps, float weight_decay, "
        "bool adamw_mode, bool bias_correction, bool maximize, float grad_scale",
    )
