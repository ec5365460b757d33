"""Attention of DeepSpeed's ``transformer_inference`` with a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.compat.deepspeed.inference import full_mask
from opkiln.compat.deepspeed.modules import takes
from opkiln.errors import ArgumentError
from opkiln.nn import inference as ops


class Workspace:
    """The state that DeepSpeed keeps once for a process: the caches of all layers, and the number
    of tokens so far.

    A call with several tokens is a prompt and starts again from the first token. A call with one
    token appends it. The last layer's call counts the token. A layer's memory is taken at its first
    call.
    """

    def __init__(self, _module: object) -> None:
        self.tokens = 1  # with the one that the next call appends
        self.batch, self.most, self.layers = 0, 0, 0
        self.caches: dict[int, Tensor] = {}  # of each layer, the keys and the values

    @takes(
        "hidden_dim heads prompt_length batch_size layers mp_size external_cache rank "
        "max_out_tokens min_out_tokens",
        optional=1,
    )
    def allocate_workspace(self, given: Any) -> None:
        """Set the size of the caches: ``batch_size`` sequences of ``max_out_tokens`` at most."""
        if (given.batch_size, given.max_out_tokens) != (self.batch, self.most):
            self.caches.clear()
        self.batch, self.most, self.layers = given.batch_size, given.max_out_tokens, given.layers

    def release_workspace(self) -> None:
        """Give the memory back."""
        self.caches.clear()

    def retake_workspace(self) -> bool:
        """True: the calls take memory when they need it."""
        return True

    def reset_cache(self) -> None:
        """Start again, with no token so far."""
        self.tokens = 1

    def repeat_kv_cache(self, source_batch_size: int, repeats: int) -> list[Tensor]:
        """Copy each of the first sequences ``repeats`` times, until the batch is full. Returns the
        keys and the values of each layer, without room for more."""
        if repeats < 1 or source_batch_size < 1 or source_batch_size * repeats != self.batch:
            raise ArgumentError(
                f"{source_batch_size} sequences, {repeats} times: the workspace is for {self.batch}"
            )
        if self.tokens <= 1 or len(self.caches) < self.layers:
            raise ArgumentError("no prompt has been through all layers yet")
        found = []
        for layer in range(self.layers):
            for cache in self.caches[layer]:
                used = cache[:, :, : self.tokens - 1]
                used.copy_(used[:source_batch_size].repeat_interleave(repeats, 0))
                found.append(used)
        return found

    @takes(
        "query_key_value mask rotary_dim rotate_half rotate_every_two heads kv_heads norm_factor "
        "triangular local_attention window_size no_masking layer layers alibi rope_theta "
        "is_prompt token_idx position_ids",
        optional=2,
    )
    def softmax_context(self, given: Any) -> list[Tensor]:
        """Append to a layer's cache and attend to it, with scores times ``norm_factor ** 2``.

        ``query_key_value`` is [batch, tokens, (heads + 2 * kv heads) * head]; ``kv_heads`` is 0 if
        there are as many of them as heads. Returns the attention [batch, tokens, heads * head], and
        views of all keys and values, [batch, heads, tokens so far, head]. The number of tokens says
        whether it is a prompt, a mask of one dimension that there is none.
        """
        qkv, heads = given.query_key_value, given.heads
        batch, new, width = qkv.shape
        kv_heads = given.kv_heads if given.kv_heads > 0 else heads
        head = width // (heads + 2 * kv_heads)
        if new > 1:
            self.tokens = new
        total, first = self.tokens, self.tokens - new
        every = qkv.view(batch, new, -1, head)
        q, k, v = every.split_with_sizes((heads, kv_heads, kv_heads), 2)
        if given.rotary_dim > 0 and (given.rotate_half or given.rotate_every_two):
            positions = torch.arange(first, total, device=q.device)
            q, k = ops.rotary_qk(
                q, k, positions, dim=given.rotary_dim, theta=given.rope_theta,
                interleaved=not given.rotate_half,
            )  # fmt: skip
        keys, values = self._cache(given.layer, qkv, (batch, heads, head), first)[
            :, :batch, :, :total
        ]
        for cache, fresh in ((keys, k), (values, v)):
            cache[:, :, first:] = fresh.transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        causal = given.triangular and new > 1
        mask = given.mask
        if mask.dim() > 1 and mask.shape[-1] < total:
            # As in DeepSpeed's Python code: keys that the mask does not know are hidden.
            least, unknown = torch.finfo(q.dtype).min, total - mask.shape[-1]
            mask = functional.pad(mask.to(q.dtype), (0, unknown), value=least)
        mask = full_mask(given, mask, (batch, heads, new, total), q)
        if causal and mask is not None:
            ones = torch.ones(new, total, dtype=torch.bool, device=q.device)
            mask = mask.masked_fill(ones.triu_(1), -torch.inf)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=None if mask is None else mask.to(q.dtype),
            is_causal=causal and mask is None,
            scale=given.norm_factor * given.norm_factor,
        )
        if given.layer == given.layers - 1:
            self.tokens += 1
        return [out.transpose(1, 2).reshape(batch, new, heads * head), keys, values]

    def _cache(self, layer: int, like: Tensor, sizes: tuple[int, int, int], first: int) -> Tensor:
        """The keys and the values of a layer, one after the other."""
        if self.tokens > self.most:
            raise ArgumentError(
                f"{self.tokens} tokens, the workspace has room for {self.most}",
                hint="max_out_tokens of DeepSpeed's configuration says how many there may be",
            )
        batch, heads, head = sizes
        shape = (max(self.batch, batch), heads, self.most, head)
        cache = self.caches.get(layer)
        if cache is None or (cache.shape[1:], cache.dtype, cache.device) != (
            shape, like.dtype, like.device
        ):  # fmt: skip
            if first > 0:
                raise ArgumentError(
                    f"layer {layer} has no cache of {list(shape)}, {like.dtype}: "
                    "a prompt comes first"
                )
            cache = self.caches[layer] = like.new_zeros((2, *shape))
        return cache
