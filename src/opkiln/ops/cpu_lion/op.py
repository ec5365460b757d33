"""The builder and the schemas of ``cpu_lion``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.optimizing.builders import HostBuilder, host_schemas


class CPULionBuilder(HostBuilder):
    """``load()`` gives ``cpu_lion_`` and ``cpu_lion_rollback_``, see reference.py for both, and the
    form of the first over kept lists."""

    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"
    SCHEMAS = host_schemas(
        "cpu_lion",
        ("exp_avgs",),
        "float lr, float beta1, float beta2, float weight_decay, bool maximize, float grad_scale",
    )
