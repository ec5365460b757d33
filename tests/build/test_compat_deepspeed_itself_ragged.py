"""DeepSpeed-FastGen's state of sequences and its kernel classes from PyPI, on opkiln.

They need an interpreter that has DeepSpeed, as ``test_compat_deepspeed_itself.py`` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_programs import PYTHON, Programs

if PYTHON is None:
    pytest.skip("there is no DeepSpeed here: make test-deepspeed", allow_module_level=True)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "cache", tmp_path)


PIECES = """
    import opkiln.compat.deepspeed as on_opkiln
    on_opkiln.install()
    import deepspeed, torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.ragged_ops import RaggedOpsBuilder
    from deepspeed.ops.op_builder.ragged_utils import RaggedUtilsBuilder
    from torch.nn import functional as F
    # FastGen takes its builders from DeepSpeed's list for GPUs, puts tensors on a GPU, and pins
    # memory for it: here all this is given by hand.
    op_builder.RaggedOpsBuilder = RaggedOpsBuilder
    op_builder.RaggedUtilsBuilder = RaggedUtilsBuilder
    get_accelerator().current_device = lambda: "cpu"
    arange = torch.arange
    torch.arange = lambda *args, pin_memory=False, **words: arange(*args, **words)
    from deepspeed.inference.v2.kernels.ragged_ops import (
        AtomBuilder, BlockedFlashAttn, BlockedRotaryEmbeddings, LinearBlockedKVCopy, MoEGather,
        MoEScatter, RaggedEmbeddingKernel, RaggedLogitsGather, RaggedTopKGating)
    from deepspeed.inference.v2.ragged import DSStateManager, RaggedBatchWrapper
    from deepspeed.inference.v2.ragged.manager_configs import (
        AllocationMode, DSStateManagerConfig, KVCacheConfig, MemoryConfig)

    dtype, heads, kv_heads, head, size = torch.bfloat16, 4, 2, 64, 16
    config = DSStateManagerConfig(
        max_tracked_sequences=8, max_ragged_batch_size=128, max_ragged_sequence_count=8,
        memory_config=MemoryConfig(mode=AllocationMode.ALLOCATE, size=40))
    state = DSStateManager(config, (KVCacheConfig(
        block_size=size, cache_shape=(1, kv_heads, head), cache_dtype=dtype),))
    wrapper = RaggedBatchWrapper(config)
    torch.manual_seed(0)
    near = lambda one, two: bool(((one.double() - two).norm() / two.norm()) < 2**-7)

    def described(tokens_of):
        "A batch of these tokens, by sequence."
        wrapper.clear()
        for uid, tokens in tokens_of.items():
            seq = state.get_or_create_sequence(uid)
            needed = -(-(seq.seen_tokens + len(tokens)) // size) - seq.cur_allocated_blocks
            if needed > 0:
                seq.extend_kv_cache(state.allocate_blocks(needed))
            seq.pre_forward(len(tokens))
            wrapper.insert_sequence(seq, tokens)
        wrapper.finalize(padding=True)

    answer = []
"""


def test_fastgens_attention_runs_on_opkilns_ops(programs: Programs) -> None:
    """Prompts, then single tokens beside a new prompt; with rotary embedding, and without."""
    found = programs.answer(
        PIECES
        + """
    def rotated(x, first):
        at = torch.arange(first, first + len(x)).double()
        z = torch.complex(*x.double().chunk(2, -1))
        steps = 10000.0 ** -(torch.arange(head // 2).double() / (head // 2))
        z = z * torch.exp(1j * at[:, None, None] * steps)
        return torch.cat((z.real, z.imag), -1)

    for writes, turn in (
        (BlockedRotaryEmbeddings(head, heads, kv_heads, dtype, head, 10000.0), rotated),
        (LinearBlockedKVCopy(head, heads, kv_heads, dtype), lambda x, first: x.double()),
    ):
        history = {}
        for batch in ({1: 20, 2: 5}, {1: 1, 3: 33, 2: 1}, {3: 1, 1: 1, 2: 1}):
            described({uid: torch.randint(9, (count,)) for uid, count in batch.items()})
            width = (heads + 2 * kv_heads) * head
            qkv = torch.randn(wrapper.tensor_toks, width).to(dtype)
            given = qkv.clone()
            cache = state.get_cache(0)
            writes(cache, qkv, wrapper)
            atoms, count = AtomBuilder()(torch.empty(64, 8, dtype=torch.int32), wrapper, 8, size)
            out = torch.zeros(len(qkv), heads * head, dtype=dtype)
            q = qkv[:, : heads * head]
            BlockedFlashAttn(head, dtype)(
                out, q, cache[:, :, 0], cache[:, :, 1], atoms[:count], head**-0.5)
            at = 0
            for uid, count in batch.items():
                parts = given[at : at + count].unflatten(1, (-1, head))
                q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
                seen = state.get_sequence(uid).seen_tokens
                k, v = turn(k, seen), v.double()
                if seen:
                    k, v = torch.cat((history[uid][0], k)), torch.cat((history[uid][1], v))
                history[uid] = k, v
                mask = torch.ones(count, len(k), dtype=torch.bool).tril(len(k) - count)
                expected = F.scaled_dot_product_attention(
                    turn(q, seen).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask,
                    enable_gqa=True).transpose(0, 1).flatten(1)
                answer.append(near(out[at : at + count], expected))
                state.get_sequence(uid).post_forward()
                at += count
        for uid in history:
            state.flush_sequence(uid)
    answer.append(sorted((name, each.origin) for name, each in on_opkiln.served().items()))
    """
    )
    assert found == [True] * 16 + [[["ragged_device_ops", "ops"], ["ragged_ops", "ops"]]]


def test_fastgens_rows_and_experts_run_on_opkilns_ops(programs: Programs) -> None:
    found = programs.answer(
        PIECES
        + """
    ids = {1: torch.randint(50, (6,)), 2: torch.randint(50, (1,))}
    described(ids)
    tokens, wide, experts, k = wrapper.tensor_toks, 64, 4, 2
    table, places = torch.randn(50, wide).to(dtype), torch.randn(16, wide).to(dtype)
    x = torch.zeros(tokens, wide, dtype=dtype)
    RaggedEmbeddingKernel(dtype, torch.int64, wide)(x, wrapper, table, places)
    at = torch.tensor([0, 1, 2, 3, 4, 5, 0])
    expected = table[torch.cat(list(ids.values()))].double() + places[at].double()
    answer += [near(x[:7], expected), not x[7:].any().item()]

    counts = torch.zeros(experts, dtype=torch.int32)
    scores = torch.empty(tokens, k)
    assignments, offsets, slots = (torch.empty(tokens, k, dtype=torch.int32) for _ in range(3))
    logits = torch.randn(tokens, experts).to(dtype)
    RaggedTopKGating(dtype)(counts, scores, assignments, offsets, logits, wrapper)
    shares, chosen = logits[:7].float().softmax(1).topk(k)
    answer += [near(scores[:7], shares.double()), bool((assignments[7:] == -1).all())]
    rows = torch.zeros(tokens * k, wide, dtype=dtype)
    sums = torch.empty(experts, dtype=torch.int64)
    MoEScatter(dtype, wide)(rows, sums, slots, x, counts, assignments, offsets)
    answer.append(sums.tolist() == chosen.flatten().bincount(minlength=experts).cumsum(0).tolist())
    factor = torch.zeros(tokens * k, 1, dtype=dtype)
    first = 0
    for expert, last in enumerate(sums.tolist()):
        factor[first:last], first = expert + 1, last
    out = torch.zeros(tokens, wide, dtype=dtype)
    MoEGather(dtype, wide, True)(out, rows * factor, scores, slots, counts)
    shares = shares.double() / shares.double().sum(1, keepdim=True)
    expected = x[:7].double() * (shares * (chosen + 1)).sum(1, keepdim=True)
    answer += [near(out[:7], expected), not out[7:].any().item(), not counts.any().item()]
    last = torch.zeros(2, wide, dtype=dtype)
    RaggedLogitsGather(wide, dtype)(last, x, wrapper)
    answer.append(torch.equal(last, x[[5, 6]]))
    """
    )
    assert found == [True] * 9
