"""Long documents: a small encoder finds two equal marks that may be thousands of tokens apart. A
block sees its neighbours and a global block, which sees all; nothing of tokens x tokens is stored.

    python examples/long_document.py [--tokens 1024] [--steps 30]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from opkiln.nn import sparse_attention as sparse

WORDS, HEADS, HEAD = 32, 2, 16
WIDTH = HEADS * HEAD


class Layer(nn.Module):
    def __init__(self, layout: sparse.Layout) -> None:
        super().__init__()
        self.layout = layout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for each in parts)
        x = x + self.out(sparse.attention(q, k, v, self.layout).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Encoder(nn.Module):
    """The first token, in the global block, gives the answer for its document."""

    def __init__(self, layout: sparse.Layout) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(Layer(layout), Layer(layout))
        self.answer = nn.Linear(WIDTH, 1)

    def forward(self, document: Tensor) -> Tensor:
        return self.answer(self.layers(self.words(document))[:, 0])[:, 0]


def documents(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Documents with a mark somewhere, and whether it is the mark of the first token."""
    found = torch.randint(8, WORDS, (batch, tokens))
    marks, same = torch.randint(0, 2, (batch,)), torch.randint(0, 2, (batch,))
    found[:, 0] = marks
    place = torch.randint(tokens // 2, tokens, (batch,))
    found[torch.arange(batch), place] = torch.where(same == 1, marks, 1 - marks)
    return found, same.float()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    layout = sparse.Longformer(32, num_sliding_window_blocks=3)
    model = Encoder(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        document, same = documents(8, options.tokens)
        loss = nn.functional.binary_cross_entropy_with_logits(model(document), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    part = max(1, options.steps // 10)
    share = layout.plan(options.tokens).seen.float().mean().item()
    print(f"{share:.1%} of all pairs of blocks are computed")
    print(f"loss {sum(losses[:part]) / part:.2f} -> {sum(losses[-part:]) / part:.2f}")


if __name__ == "__main__":
    main()
