"""Train a BERT-like model with random layer-token drop: its middle layers see half of the tokens.

    python examples/random_ltd.py

The task is random data with a rule: each token is to say whether its sequence has more ones than
zeros. Runs on a GPU if there is one, otherwise on the CPU, in seconds.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from opkiln.nn import random_ltd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, TOKENS, WIDTH, HEADS, LAYERS = 8, 32, 32, 2, 4
DROPPING = range(1, LAYERS - 1)  # the first and the last layer see all tokens
STEPS = 50

torch.set_num_threads(1)  # the model is too small to gain from more


class Layer(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(2, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.answer = nn.Linear(WIDTH, 1)

    def forward(self, words: Tensor, mask: Tensor, kept: int) -> Tensor:
        x = self.words(words) + self.places.weight
        if kept == TOKENS:
            for layer in self.layers:
                x = layer(x, mask)
            return self.answer(x).squeeze(-1)
        # Which tokens each dropping layer sees, and the mask between them.
        indices, masks = random_ltd.bert_sample_tokens(
            kept, TOKENS, len(words), len(DROPPING), words.device, mask
        )
        for number, layer in enumerate(self.layers):
            if number in DROPPING:
                at = number - DROPPING.start
                part = random_ltd.token_gather(x, indices[at])
                x = random_ltd.token_scatter(x, layer(part, masks[at]), indices[at])
            else:
                x = layer(x, mask)
        return self.answer(x).squeeze(-1)


def train(kept: int) -> tuple[float, float, float]:
    """The losses of the first and the last step, and the seconds of a step."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses: list[float] = []
    start = 0.0
    for step in range(STEPS):
        if step == 5:  # the first steps compile and warm up
            start = time.perf_counter()
        words = torch.randint(0, 2, (BATCH, TOKENS), device=DEVICE)
        lengths = torch.randint(TOKENS // 2, TOKENS + 1, (BATCH,), device=DEVICE)
        there = torch.arange(TOKENS, device=DEVICE) < lengths[:, None]
        # No token sees what lies beyond the end of its sequence, except itself.
        mask = there[:, None, None, :] | torch.eye(TOKENS, dtype=torch.bool, device=DEVICE)
        target = (2 * (words * there).sum(1) > lengths).float()[:, None].expand(-1, TOKENS)
        said = model(words, mask, kept)
        loss = nn.functional.binary_cross_entropy_with_logits(said[there], target[there])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], sum(losses[-10:]) / 10, (time.perf_counter() - start) / (STEPS - 5)


if __name__ == "__main__":
    for kept in (TOKENS, TOKENS // 2):
        first, last, seconds = train(kept)
        print(
            f"{kept} of {TOKENS} tokens in {len(DROPPING)} of {LAYERS} layers: "
            f"loss {first:.2f} -> {last:.2f}, {seconds * 1e3:.1f} ms a step on {DEVICE}"
        )
        assert last < 0.8 * first, "it does not learn"
