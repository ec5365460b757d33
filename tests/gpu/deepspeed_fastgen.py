"""DeepSpeed-FastGen's attention on opkiln's ops on a GPU. Needs DeepSpeed, and no pytest.

    PYTHONPATH=src python tests/gpu/deepspeed_fastgen.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys

import torch
from checks import Skipped, main
from torch import Tensor
from torch.nn import functional

import opkiln.compat.deepspeed as on_opkiln
from opkiln.errors import UsageError

DEVICE = "cuda"
NEAR = {torch.float16: 2**-8, torch.bfloat16: 2**-5}  # of the length of a result


def installed() -> None:
    """DeepSpeed's builders on opkiln, from here on."""
    try:
        on_opkiln.install()
    except UsageError as error:
        raise Skipped(error.what) from error
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.ragged_ops import RaggedOpsBuilder
    from deepspeed.ops.op_builder.ragged_utils import RaggedUtilsBuilder

    # FastGen takes them from DeepSpeed's list.
    op_builder.RaggedOpsBuilder = RaggedOpsBuilder
    op_builder.RaggedUtilsBuilder = RaggedUtilsBuilder


def check_fastgens_attention_is_near_to_float64() -> str:
    """Prompts, then single tokens beside a new prompt, through FastGen's own state and classes."""
    installed()
    from deepspeed.inference.v2.kernels.ragged_ops import (
        AtomBuilder,
        BlockedFlashAttn,
        BlockedRotaryEmbeddings,
    )
    from deepspeed.inference.v2.ragged import DSStateManager, RaggedBatchWrapper
    from deepspeed.inference.v2.ragged.manager_configs import (
        AllocationMode,
        DSStateManagerConfig,
        KVCacheConfig,
        MemoryConfig,
    )

    heads, kv_heads, head, size = 8, 2, 128, 64
    worst = dict.fromkeys(NEAR, 0.0)
    for dtype, near in NEAR.items():
        config = DSStateManagerConfig(
            max_tracked_sequences=8, max_ragged_batch_size=512, max_ragged_sequence_count=8,
            memory_config=MemoryConfig(mode=AllocationMode.ALLOCATE, size=60),
        )  # fmt: skip
        cached = KVCacheConfig(block_size=size, cache_shape=(1, kv_heads, head), cache_dtype=dtype)
        state, wrapper = DSStateManager(config, (cached,)), RaggedBatchWrapper(config)
        writes = BlockedRotaryEmbeddings(head, heads, kv_heads, dtype, head, 10000.0)
        history: dict[int, tuple[Tensor, Tensor]] = {}
        for counts in ({1: 200, 2: 5}, {1: 1, 3: 133, 2: 1}, {3: 1, 1: 1, 2: 1}):
            wrapper.clear()
            for uid, count in counts.items():
                seq = state.get_or_create_sequence(uid)
                needed = -(-(seq.seen_tokens + count) // size) - seq.cur_allocated_blocks
                if needed > 0:
                    seq.extend_kv_cache(state.allocate_blocks(needed))
                seq.pre_forward(count)
                wrapper.insert_sequence(seq, torch.zeros(count, dtype=torch.int64))
            wrapper.finalize(padding=True)
            width = (heads + 2 * kv_heads) * head
            qkv = torch.randn(wrapper.tensor_toks, width).to(DEVICE, dtype)
            given = qkv.double()
            cache_ = state.get_cache(0)
            writes(cache_, qkv, wrapper)
            atoms, found = AtomBuilder()(torch.empty(64, 8, dtype=torch.int32), wrapper, 64, size)
            out = torch.zeros(len(qkv), heads * head, dtype=dtype, device=DEVICE)
            BlockedFlashAttn(head, dtype)(
                out, qkv[:, : heads * head], cache_[:, :, 0], cache_[:, :, 1],
                atoms[:found].to(DEVICE), head**-0.5,
            )  # fmt: skip
            start = 0
            for uid, count in counts.items():
                seq = state.get_sequence(uid)
                parts = given[start : start + count].unflatten(1, (-1, head))
                q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
                q, k = turned(q, seq.seen_tokens), turned(k, seq.seen_tokens)
                if uid in history:
                    k, v = torch.cat((history[uid][0], k)), torch.cat((history[uid][1], v))
                history[uid] = k, v
                mask = torch.ones(count, len(k), dtype=torch.bool, device=DEVICE)
                expected = functional.scaled_dot_product_attention(
                    *(each.transpose(0, 1) for each in (q, k, v)), mask.tril(len(k) - count),
                    enable_gqa=True,
                )  # fmt: skip
                exact = expected.transpose(0, 1).flatten(1)
                far = float((out[start : start + count].double() - exact).norm() / exact.norm())
                worst[dtype] = max(worst[dtype], far)
                assert far <= near, (dtype, uid, far)
                seq.post_forward()
                start += count
    served = {name: each.origin for name, each in on_opkiln.served().items()}
    assert served == {"ragged_device_ops": "ops", "ragged_ops": "ops"}, served
    return ", ".join(f"{str(dtype)[6:]} {far:.2g}" for dtype, far in worst.items())


def turned(x: Tensor, first: int) -> Tensor:
    """Rotary embedding of [tokens, heads, head] in float64."""
    pairs = x.shape[2] // 2
    at = torch.arange(first, first + len(x), device=x.device, dtype=torch.float64)
    steps = torch.arange(pairs, device=x.device, dtype=torch.float64) / pairs
    z = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * at[:, None, None] * 10000.0**-steps)
    return torch.cat((z.real, z.imag), -1)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
