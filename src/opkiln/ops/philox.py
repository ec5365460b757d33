"""Random bits that depend on a counter and a key alone: the same on every device."""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF


def philox(low: Tensor, high: int | Tensor, key: int | Tensor, rounds: int = 7) -> list[Tensor]:
    """Philox4x32: four words, in int64, for counters of 128 bits (two int64) and a key of 64."""
    c = [low & WORD, low >> 32 & WORD, high & WORD | low * 0, high >> 32 & WORD | low * 0]
    k0, k1 = key & WORD, key >> 32 & WORD
    for _ in range(rounds):
        # Products wrap around in int64, and so keep their 64 bits.
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (p1 >> 32 & WORD) ^ c[1] ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c[3] ^ k1, p0 & WORD,
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c
