"""What ``ragged_device_ops`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "ragged_device_ops",
    cuda=("paged.cu",),
    schemas=(
        "paged_kv_copy(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor block_table, Tensor sequences, Tensor positions) -> ()",
        "paged_kv_rotary(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor block_table, Tensor sequences, Tensor positions, Tensor? cos=None, "
        "Tensor? sin=None, SymInt dim=0, float theta=10000.0) -> Tensor",
    ),
    functions="opkiln.ops.ragged_device_ops.functions",
    namespace="opkiln",
)
