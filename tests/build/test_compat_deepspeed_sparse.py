"""DeepSpeed's SparseSelfAttention over opkiln's op, with configurations as DeepSpeed's."""

from __future__ import annotations

import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)
from torch import Tensor

from opkiln.compat.deepspeed.layers import SparseSelfAttention
from opkiln.compat.deepspeed.modules import OpModule


class Configuration:
    """What DeepSpeed's configurations have: blocks as int64, for each head."""

    def __init__(self, heads: int, block: int, *, different: bool = False) -> None:
        self.heads, self.block, self.different = heads, block, different

    def make_layout(self, tokens: int) -> Tensor:
        count = tokens // self.block
        near = torch.ones(count, count).tril().triu(-1).long().expand(self.heads, -1, -1).clone()
        if self.different:
            near[0, :, 0] = 1
        return near


def dense(x: Tensor, module: SparseSelfAttention, hidden: Tensor, added: Tensor | float) -> Tensor:
    tokens, block = x.shape[2], module.sparsity_config.block
    seen = module.master_layout.repeat_interleave(block, 1).repeat_interleave(block, 2) != 0
    scores = x @ x.mT * x.shape[3] ** -0.5 + added
    scores = scores.masked_fill(~seen[:, :tokens, :tokens] | hidden, -torch.inf)
    return torch.softmax(scores, -1) @ x


@pytest.mark.parametrize("different", [False, True])
def test_masks_and_layouts_are_deepspeeds(different: bool) -> None:
    torch.manual_seed(0)
    module = SparseSelfAttention(Configuration(3, 16, different=different), max_seq_length=128)
    x = torch.randn(2, 3, 64, 32)
    bias, causal = torch.randn(2, 64), torch.ones(64, 64).tril()
    out = module(x, x, x, key_padding_mask=bias[:, None, None], attn_mask=causal)
    wanted = dense(x, module, causal == 0, bias[:, None, None])
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    rpe = torch.randn(2, 3, 64, 64)
    out = module(x, x.mT, x, rpe=rpe, attn_mask=causal)
    torch.testing.assert_close(out, dense(x, module, causal == 0, rpe), rtol=1e-5, atol=1e-5)
    assert module.layout().heads == (3 if different else 1)


def test_a_loaded_layout_is_used() -> None:
    module = SparseSelfAttention(Configuration(2, 16), max_seq_length=64)
    assert not module.layout().blocks(4)[0, 3, 0]
    other = {"master_layout": torch.ones_like(module.master_layout)}
    module.load_state_dict(other)
    assert module.layout().blocks(4).all()


def test_the_module_has_the_front_end() -> None:
    assert OpModule("sparse_attn").SparseSelfAttention is SparseSelfAttention
