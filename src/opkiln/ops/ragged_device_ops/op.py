"""What ``ragged_device_ops`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "ragged_device_ops",
    cuda=("paged.cu", "rows.cu", "gating.cu"),
    schemas=(
        (
            "paged_kv_copy(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
            "Tensor block_table, Tensor sequences, Tensor positions) -> ()"
        ),
        (
            "paged_kv_rotary(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
            "Tensor block_table, Tensor sequences, Tensor positions, Tensor? cos=None, "
            "Tensor? sin=None, SymInt dim=0, float theta=10000.0) -> Tensor"
        ),
        (
            "top_k_gating(Tensor logits, SymInt k, bool normalize=False) "
            "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
        ),
        "moe_scatter(Tensor x, Tensor slots) -> Tensor",
        "moe_gather(Tensor rows, Tensor slots, Tensor? weights=None) -> Tensor",
        (
            "ragged_embedding(Tensor tokens, Tensor weight, Tensor? positions=None, "
            "Tensor? position_weight=None, SymInt position_offset=0) -> Tensor"
        ),
        "logits_gather(Tensor x, Tensor starts, Tensor lengths) -> Tensor",
    ),
    functions="opkiln.ops.ragged_device_ops.functions",
    namespace="opkiln",
)
