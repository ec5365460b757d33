"""The cells of distributed_ranks.py by name, ``way/optimizer``, and how much each may differ.

Imports nothing of torch.distributed, which takes seconds: tests are collected with this.
"""

from __future__ import annotations

from typing import Any

STEPS, SAVED_AFTER = 6, 3
# What differs where norms are summed over ranks. The sums are in double, or of fp32 norms for
# max_grad_norm; in another order they are off by their last bit at most, and so then is the factor
# of the step, once rounded to fp32: 2^-23 of a step, and a rounding of each parameter, which are
# up to 4 in size here, by 2^-22 at most. All else is the same to the last bit.
NEARLY = STEPS * 2.0**-22
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "CPUAdam": {"lr": 0.01, "weight_decay": 0.1},
    "CPUAdagrad": {"lr": 0.05, "weight_decay": 0.1},
    "CPULion": {"lr": 0.01, "weight_decay": 0.1},
    "FusedAdam": {"lr": 0.01, "weight_decay": 0.1},
    "FusedLion": {"lr": 0.01, "weight_decay": 0.1},
    "FusedLamb": {"lr": 0.01, "weight_decay": 0.1},
}
TORCHS = ("AdamW",)  # to see what is torch's doing
HOST = [name for name in OPTIMIZERS if name.startswith("CPU")]
FUSED = [name for name in OPTIMIZERS if name.startswith("Fused")]
REFUSED = ("FSDP1/FusedLamb", "FSDP1, checkpoint/FusedLamb")

# Of all optimizers, torch's too, for the table.
WAYS = (
    "DDP",
    "FSDP1",
    "FSDP2",
    "ZeroRedundancyOptimizer",
    "DDP, checkpoint",
    "FSDP1, checkpoint",
    "FSDP2, checkpoint",
    "FSDP2, checkpoint to 4 ranks",
)
# Of some, with DTensors that were placed by hand.
BY_HAND = {
    "Shard(1)": [*HOST, *FUSED],
    "Replicate": [*HOST, *FUSED],
    "Shard(0) x Replicate": [*HOST, *FUSED],
    "Replicate x Shard(0)": [*HOST, *FUSED],
    "Shard(0) x Shard(1)": [*HOST, *FUSED],
    "Shard(0) x Shard(0)": [*HOST, *FUSED],
    "gradients placed otherwise": [*HOST, *FUSED],
    "mixed parameters": [*HOST, *FUSED],
    "16-bit parameters": [*HOST, *FUSED],
    "refusals": [*HOST, *FUSED],
    "max_grad_norm": FUSED,
    "GradScaler": FUSED,
    "copies, background, rollback": HOST,
    "kept lists": HOST,
}


# The optimizers of a kind share their code for tensors of several ranks. One of each kind is in
# every run: FusedLamb of the fused ones, since its step needs all ranks.
_FEW = ("CPUAdam", "FusedLamb")
PARTS = ("few", "rest")


def part_of(cell: str) -> str:
    """The part of the cells that it belongs to: only the first is in every run of the tests."""
    way, name = cell.split("/")
    instead = name == "FusedAdam" and f"{way}/FusedLamb" in REFUSED
    return PARTS[0] if name in _FEW or instead else PARTS[1]


def cells(ranks: int, part: str = "") -> list[str]:
    """Those that so many ranks run, all or those of a part."""
    every = {**{way: list(OPTIMIZERS) for way in WAYS}, **BY_HAND}
    named = [
        f"{way}/{name}"
        for way, names in every.items()
        if (" x " in way or "4 ranks" in way) == (ranks == 4)
        for name in names
    ]
    return [cell for cell in named if part in ("", part_of(cell))]


def allowed(cell: str) -> float:
    """The difference that a cell may show."""
    way, name = cell.split("/")
    return NEARLY if name == "FusedLamb" or way == "max_grad_norm" else 0.0
