"""Ops that DeepSpeed has under another name, or that are not here."""

from __future__ import annotations

# DeepSpeed's name -> the op that has its functions.
ELSEWHERE = {
    "cutlass_ops": "mixed_gemm",
    "deepspeed_shm_comm": "shm_comm",
    "inference_core_ops": "transformer_inference",
    "ragged_ops": "ragged_device_ops",
}
_COLLECTIVES = "torch.distributed has these collectives, with oneCCL as its backend"
NOT_HERE = {
    "dc": "DeepCompile changes graphs for DeepSpeed's own engine, and is of use with that alone",
    "ccl_comm": _COLLECTIVES,
    "deepspeed_ccl_comm": _COLLECTIVES,
}


def variables(op: str) -> tuple[str, ...]:
    """DeepSpeed's variables that select an op for precompilation by its name there."""
    return tuple(f"DS_BUILD_{name.upper()}" for name, here in ELSEWHERE.items() if here == op)
