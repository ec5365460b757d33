"""Train a small Evoformer block: an alignment and a pair representation that inform each other.

    python examples/evoformer_block.py

Rows of the alignment attend along the sequence, biased by the pairs. Columns attend along the
alignment. The alignment's outer product updates the pairs, whose rows and columns attend around
the third edge of each triangle. Every attention is ``opkiln.nn.evoformer_attention``. The task is
random data with a rule: some columns are copies of others, and the pairs are to say which.
Runs on a GPU in bfloat16 if there is one, otherwise on the CPU, in seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opkiln.nn import evoformer_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
ROWS, LENGTH, LETTERS, WIDTH, HEADS, HEAD = 24, 16, 4, 32, 2, 16
STEPS = 60

torch.set_num_threads(1)  # the block is too small to gain from more


class Attention(nn.Module):
    """Gated attention within each row of ``x``, [batch, rows, length, width]. With ``biased``,
    pairs [batch, length, length, width] give a bias that all rows share."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(HEADS * HEAD, WIDTH)
        self.qkvg = nn.Linear(WIDTH, 4 * HEADS * HEAD)
        self.bias = nn.Linear(WIDTH, HEADS, bias=False) if biased else None

    def forward(self, x: Tensor, mask: Tensor, pairs: Tensor | None = None) -> Tensor:
        q, k, v, gate = self.qkvg(self.norm(x)).unflatten(-1, (4, HEADS, HEAD)).unbind(-3)
        bias = None
        if self.bias is not None:
            bias = self.bias(pairs).permute(0, 3, 1, 2)[:, None]
        seen = evoformer_attention(q, k, v, mask, bias)
        return x + self.out((seen * gate.sigmoid()).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.answer = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, 1)
        self.along_rows, self.along_columns = Attention(biased=True), Attention(biased=False)
        self.left, self.right = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.outer = nn.Linear(64, WIDTH)
        self.starting, self.ending = Attention(biased=True), Attention(biased=True)

    def forward(self, alignment: Tensor, mask: Tensor) -> Tensor:
        x = self.letters(alignment)
        batch, rows, length, width = x.shape
        pairs = x.new_zeros(batch, length, length, width)
        of_rows = mask.expand(batch, rows, 1, 1, length)
        x = self.along_rows(x, of_rows, pairs)
        of_columns = x.new_zeros(batch, length, 1, 1, rows)
        x = self.along_columns(x.transpose(1, 2), of_columns).transpose(1, 2)
        product = torch.einsum("bnic,bnjd->bijcd", self.left(x), self.right(x)) / rows
        pairs = pairs + self.outer(product.flatten(-2))
        of_pairs = mask.expand(batch, length, 1, 1, length)
        pairs = self.starting(pairs, of_pairs, pairs)
        pairs = self.ending(pairs.transpose(1, 2), of_pairs, pairs).transpose(1, 2)
        return self.answer(pairs).squeeze(-1)


def example() -> tuple[Tensor, Tensor]:
    """Alignments, and which pairs of their columns are equal."""
    alignment = torch.randint(LETTERS, (2, ROWS, LENGTH))
    source = torch.randint(LENGTH // 2, (2, 1, LENGTH // 2)).expand(-1, ROWS, -1)
    alignment[:, :, LENGTH // 2 :] = alignment.gather(2, source)
    equal = (alignment[..., None] == alignment[..., None, :]).all(1)
    return alignment.to(DEVICE), equal.to(DEVICE)


torch.manual_seed(0)
model = Block().to(DEVICE, DTYPE)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
mask = torch.zeros(1, 1, 1, 1, LENGTH, device=DEVICE, dtype=DTYPE)  # -1e9 at padding
losses = []
for _ in range(STEPS):
    alignment, equal = example()
    guess = model(alignment, mask).float()
    loss = nn.functional.binary_cross_entropy_with_logits(guess, equal.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.7 * losses[0]
assert model.along_rows.bias is not None
assert model.starting.bias is not None
assert model.starting.bias.weight.grad.abs().max() > 0
print("an Evoformer block learns which columns are copies")
