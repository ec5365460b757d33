"""A small decoder with random weights generates text, plain and with fused ops: the same tokens.

python examples/decoder.py
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from opkiln.nn import inference

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 2, 512, 8, 2, 64, 1000
PROMPT, STEPS = 12, 20
Weights = dict[str, Tensor]


def random_weights(device: str, dtype: torch.dtype) -> tuple[Tensor, list[Weights]]:
    """The embedding, and the weights of each layer."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(device, dtype)

    layers = [
        {
            "norm1": torch.rand(HIDDEN).to(device, dtype),
            "norm2": torch.rand(HIDDEN).to(device, dtype),
            "qkv": matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
            "out": matrix(HIDDEN, HEADS * HEAD),
            "up": matrix(8 * HIDDEN, HIDDEN),
            "down": matrix(HIDDEN, 4 * HIDDEN),
        }
        for _ in range(LAYERS)
    ]
    return torch.randn(VOCABULARY, HIDDEN).to(device, dtype), layers


def heads_of(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Queries, keys and values, [batch, tokens, heads, HEAD] each."""
    projected = (x @ weight.T).unflatten(-1, (-1, HEAD))
    return list(projected.split([HEADS, KV_HEADS, KV_HEADS], dim=-2))


def turned(x: Tensor) -> Tensor:
    """Rotary embedding in plain PyTorch."""
    tokens, half = x.shape[1], HEAD // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(tokens, device=x.device)[:, None, None] * frequencies
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def plain(tokens: Tensor, embedding: Tensor, layers: list[Weights]) -> Tensor:
    """Everything is computed anew for each token."""
    for _ in range(STEPS):
        x = embedding[tokens]
        for w in layers:
            q, k, v = heads_of(rms_norm(x, (HIDDEN,), w["norm1"], 1e-6), w["qkv"])
            q, k, v = (each.transpose(1, 2) for each in (turned(q), turned(k), v))
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + mixed.transpose(1, 2).flatten(2) @ w["out"].T
            gate, up = (rms_norm(x, (HIDDEN,), w["norm2"], 1e-6) @ w["up"].T).chunk(2, dim=-1)
            x = x + silu(gate) * up @ w["down"].T
        best = (x[:, -1] @ embedding.T).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
    return tokens


def fused(tokens: Tensor, embedding: Tensor, layers: list[Weights]) -> Tensor:
    """Only new tokens are computed: the others are in a cache."""
    batch, given = tokens.shape
    room = (batch, KV_HEADS, given + STEPS, HEAD)
    caches = [
        inference.KVCache.empty(*room, dtype=embedding.dtype, device=embedding.device)
        for _ in layers
    ]
    lengths = caches[0].lengths
    for cache in caches:
        cache.lengths = lengths  # one for all layers
    new, positions = tokens, torch.arange(given, device=tokens.device).expand(batch, -1)
    for _ in range(STEPS):
        x, hidden = embedding[new], None
        for w, cache in zip(layers, caches, strict=True):
            if hidden is None:
                normed = inference.rms_norm(x, w["norm1"])
            else:
                normed, x = inference.pre_rms_norm(hidden, x, w["norm1"])
            q, k, v = heads_of(normed, w["qkv"])
            q, k = inference.rotary_qk(q, k, positions)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            context = given if new.shape[1] > 1 else None
            mixed = inference.attention(q, k, v, cache, context=context)
            normed, x = inference.pre_rms_norm(
                mixed.transpose(1, 2).flatten(2) @ w["out"].T, x, w["norm2"]
            )
            hidden = inference.gated_silu(normed @ w["up"].T) @ w["down"].T
        lengths += new.shape[1]
        last = (x + hidden)[:, -1]
        new = (last @ embedding.T).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], dim=1)
        positions = lengths[:, None]
    return tokens


def main() -> None:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    embedding, layers = random_weights(device, dtype)
    prompt = torch.randint(VOCABULARY, (2, PROMPT), device=device)
    with torch.no_grad():
        slow = plain(prompt, embedding, layers)
        fast = fused(prompt, embedding, layers)
    same = (slow == fast).float().mean()
    print(f"{same:.0%} of the tokens are the same")
    # In 16 bits, rounding decides where two tokens are nearly as likely, and what follows differs.
    assert same == 1 or (gpu and same > 0.5)


if __name__ == "__main__":
    main()
