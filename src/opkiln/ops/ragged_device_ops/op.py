"""The libraries of ``ragged_device_ops``, one for each source, so that a process waits for what it
calls alone. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.authoring.library import Library, library


def _family(name: str, *schemas: str) -> Library:
    return library(
        f"ragged_device_ops__{name}",
        cuda=f"{name}.cu",
        schemas=schemas,
        functions="opkiln.ops.ragged_device_ops.functions",
        namespace="opkiln",
    )


paged = _family(
    "paged",
    "listed_blocks(Tensor lists, Tensor lengths, SymInt block_size, SymInt width) -> Tensor",
    (
        "paged_kv_copy(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor block_table, Tensor sequences, Tensor positions) -> ()"
    ),
    (
        "paged_kv_rotary(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor block_table, Tensor sequences, Tensor positions, Tensor? cos=None, "
        "Tensor? sin=None, SymInt dim=0, float theta=10000.0) -> Tensor"
    ),
)
gating = _family(
    "gating",
    (
        "top_k_gating(Tensor logits, SymInt k, bool normalize=False) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
rows = _family(
    "rows",
    "moe_scatter(Tensor x, Tensor slots) -> Tensor",
    "moe_gather(Tensor rows, Tensor slots, Tensor? weights=None) -> Tensor",
    (
        "ragged_embedding(Tensor tokens, Tensor weight, Tensor? positions=None, "
        "Tensor? position_weight=None, SymInt position_offset=0) -> Tensor"
    ),
    "logits_gather(Tensor x, Tensor starts, Tensor lengths) -> Tensor",
)
kit = library("ragged_device_ops", parts=(paged, gating, rows))
