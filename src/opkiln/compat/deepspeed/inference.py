"""DeepSpeed's modules ``transformer_inference`` and ``inference_core_ops``, over opkiln's ops.

The second is small: ``opkiln.nn.core`` has its functions. In the first, functions and their
side effects are those of DeepSpeed's binding; docs/deepspeed.md says what differs. Most exist once
for each dtype, with its name at the end (``softmax_fp16``). Here a tensor's own dtype decides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.compat.deepspeed import inference_matmuls as matmuls
from opkiln.compat.deepspeed import inference_pieces as pieces
from opkiln.compat.deepspeed.modules import OpModule, likely_device
from opkiln.errors import ArgumentError
from opkiln.ops.mixed_gemm import core as fp6
from opkiln.ops.transformer_inference import core
from opkiln.ops.transformer_inference import functions as ops


class TransformerInference(OpModule):
    """``transformer_inference``: the pieces of a decoder or encoder layer, without gradients."""

    NAME = "transformer_inference"

    def _load(self) -> None:
        ops.layer_norm.load(likely_device())
        self._take(matmuls, pieces, InferenceContext(), ops)


class InferenceCore(OpModule):
    """``inference_core_ops``: the pieces of FastGen's layers."""

    NAME = "inference_core_ops"

    def _load(self) -> None:
        ops.layer_norm.load(likely_device())
        self._take(core, fp6, no_grad=False)

    @torch.no_grad()
    def blas_4d_matmul(self, C: Tensor, B: Tensor, A: Tensor) -> None:  # noqa: N803 (DeepSpeed's names)
        """``A @ B``, written to ``C``. DeepSpeed's binding takes the columns of ``C`` for those of
        ``A``, so its result is right for square matrices alone."""
        torch.matmul(A, B, out=C)

    def create_handle(self) -> None:
        """Nothing: torch has a handle for its BLAS."""


class InferenceContext:
    """Attention with a cache of keys and values.

    DeepSpeed keeps one workspace for a process: the caches of all layers, and the number of tokens
    so far. A call with several tokens is a prompt and begins anew. A call with one token appends
    it. The last layer's call counts the token. A layer's memory is taken when the layer is first
    called.
    """

    def __init__(self) -> None:
        self.tokens = 1  # with the one that the next call appends
        self.batch, self.most, self.layers = 0, 0, 0
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}

    def allocate_workspace(
        self,
        hidden_dim: int,  # noqa: ARG002 (a call's tensors say it)
        num_heads: int,  # noqa: ARG002
        prompt_length: int,  # noqa: ARG002
        batch_size: int,
        num_layers: int,
        mp_size: int = 1,  # noqa: ARG002
        external_cache: bool = False,  # noqa: ARG002
        rank: int = 0,  # noqa: ARG002
        max_out_tokens: int = 1024,
        min_out_tokens: int = 1,  # noqa: ARG002
    ) -> None:
        """Set the sizes of the caches: so many sequences with at most ``max_out_tokens`` each."""
        if (batch_size, max_out_tokens) != (self.batch, self.most):
            self.caches.clear()
        self.batch, self.most, self.layers = batch_size, max_out_tokens, num_layers

    def release_workspace(self) -> None:
        """Give the memory back."""
        self.caches.clear()

    def retake_workspace(self) -> bool:
        """True: the calls take memory when they need it."""
        return True

    def reset_cache(self) -> None:
        """Begin anew, with no token so far."""
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

    def softmax_context(
        self,
        query_key_value: Tensor,
        attn_mask: Tensor,
        rotary_dim: int,
        rotate_half: bool,
        rotate_every_two: bool,
        heads: int,
        num_kv: int,
        norm_factor: float,
        triangular: bool,
        local_attention: bool,
        window_size: int,
        no_masking: bool,  # noqa: ARG002 (a mask of one dimension says it)
        layer_id: int,
        num_layers: int,
        alibi: Tensor,
        rope_theta: float,
        is_prompt: bool,  # noqa: ARG002 (the number of tokens says it)
        token_idx: Tensor | None = None,  # noqa: ARG002
        position_ids: Tensor | None = None,  # noqa: ARG002
    ) -> list[Tensor]:
        """Append to a layer's cache and attend to it, with scores times ``norm_factor ** 2``.

        ``query_key_value`` is [batch, tokens, (heads + 2 * kv heads) * head]; ``num_kv`` is 0 if
        there are as many kv heads as heads. Returns the attention [batch, tokens, heads * head],
        and views of all keys and values, [batch, heads, tokens so far, head].
        """
        batch, new, width = query_key_value.shape
        kv_heads = num_kv if num_kv > 0 else heads
        head = width // (heads + 2 * kv_heads)
        if new > 1:
            self.tokens = new
        total, first = self.tokens, self.tokens - new
        every = query_key_value.view(batch, new, -1, head)
        q, k, v = every.split_with_sizes((heads, kv_heads, kv_heads), 2)
        if rotary_dim > 0 and (rotate_half or rotate_every_two):
            positions = torch.arange(first, total, device=q.device)
            q, k = ops.rotary_qk(
                q, k, positions, dim=rotary_dim, theta=rope_theta, interleaved=not rotate_half
            )
        keys, values = (
            cache[:batch, :, :total]
            for cache in self._caches(layer_id, query_key_value, (batch, heads, head), first)
        )
        for cache, fresh in ((keys, k), (values, v)):
            cache[:, :, first:] = fresh.transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        causal = triangular and new > 1
        mask = _mask(attn_mask, alibi, batch, heads, total, q.dtype)
        if local_attention:
            hidden = pieces.out_of_window(new, total, window_size, q.device)
            mask = hidden if mask is None else mask + hidden
        if causal and mask is not None:
            ones = torch.ones(new, total, dtype=torch.bool, device=q.device)
            mask = mask.masked_fill(ones.triu_(1), -torch.inf)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=None if mask is None else mask.to(q.dtype),
            is_causal=causal and mask is None,
            scale=norm_factor * norm_factor,
        )
        if layer_id == num_layers - 1:
            self.tokens += 1
        return [out.transpose(1, 2).reshape(batch, new, heads * head), keys, values]

    def _caches(
        self, layer: int, like: Tensor, sizes: tuple[int, int, int], first: int
    ) -> tuple[Tensor, Tensor]:
        if self.tokens > self.most:
            raise ArgumentError(
                f"{self.tokens} tokens, the workspace has room for {self.most}",
                hint="max_out_tokens of DeepSpeed's configuration says how many there may be",
            )
        batch, heads, head = sizes
        shape = (max(self.batch, batch), heads, self.most, head)
        found = self.caches.get(layer)
        if found is not None and all(
            each.shape == shape and each.dtype == like.dtype and each.device == like.device
            for each in found
        ):
            return found
        if first > 0:
            raise ArgumentError(
                f"layer {layer} has no cache of {list(shape)}, {like.dtype}: a prompt comes first"
            )
        made = like.new_zeros(shape), like.new_zeros(shape)
        self.caches[layer] = made
        return made


def _mask(
    mask: Tensor, alibi: Tensor, batch: int, heads: int, keys: int, dtype: torch.dtype
) -> Tensor | None:
    """The mask and alibi [batch * heads, 1, keys] in one, in fp32; None if there are neither."""
    if mask.dim() > 1 and mask.shape[-1] < keys:
        # As in DeepSpeed's Python code: keys that the mask does not know are hidden.
        mask = functional.pad(
            mask.to(dtype), (0, keys - mask.shape[-1]), value=torch.finfo(dtype).min
        )
    found = pieces.additive(mask, batch, keys, dtype)
    total = None if found is None else found.float()
    if alibi.dim() > 1:
        rows = alibi.reshape(-1, heads, 1, keys).float()
        total = rows if total is None else total + rows
    return total
