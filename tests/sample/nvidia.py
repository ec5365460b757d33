"""Machines with NVIDIA GPUs, as far as detection can tell: a file tree, nvidia-smi, NVML."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from sample.levels import X86_64

HERE = Path(__file__).parent


class Card(NamedTuple):
    """One GPU of a stand-in machine."""

    uuid: str = "GPU-11111111-aaaa"
    name: str = "NVIDIA H200"
    capability: str = "9.0"
    mebibytes: int = 143771
    parts: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        return self.mebibytes << 20


H200 = Card()
A100 = Card("GPU-22222222-bbbb", "NVIDIA A100-SXM4-80GB", "8.0", 81920)
B200 = Card("GPU-33333333-cccc", "NVIDIA B200", "10.0", 183359)


def tree(root: Path, *cards: Card, driver: str = "580.65.06") -> Path:
    """What the kernel module shows of itself and of these GPUs, under ``root``."""
    proc, dev = root / "proc/driver/nvidia", root / "dev"
    dev.mkdir(parents=True, exist_ok=True)
    (dev / "nvidiactl").touch()
    (proc / "gpus").mkdir(parents=True, exist_ok=True)
    (proc / "version").write_text(f"NVRM version: NVIDIA UNIX {X86_64} Kernel Module  {driver}\n")
    for number, card in enumerate(cards):
        (dev / f"nvidia{number}").touch()
        directory = proc / "gpus" / f"0000:0{number}:00.0"
        directory.mkdir(exist_ok=True)
        (directory / "information").write_text(
            f"Model: \t\t {card.name}\nIRQ:   \t\t {100 + number}\nGPU UUID: \t {card.uuid}\n"
            f"Video BIOS: \t 96.00.99\nDevice Minor: \t {number}\nGPU Excluded:\t No\n"
        )
    return root


def smi(path: Path, *cards: Card, memory: str | None = None) -> Path:
    """A program that answers as nvidia-smi does, and notes each question beside itself."""
    rows = [
        f"{number}, {card.uuid}, {card.name}, {card.capability}, {memory or card.mebibytes},"
        f" 580.65.06, {'Enabled' if card.parts else 'Disabled'}"
        for number, card in enumerate(cards)
    ]
    listed = []
    for number, card in enumerate(cards):
        listed.append(f"GPU {number}: {card.name} (UUID: {card.uuid})")
        listed += [
            f"  MIG 1g.18gb     Device  {place}: (UUID: {uuid})"
            for place, uuid in enumerate(card.parts)
        ]
    report = ["Driver Version      : 580.65.06", "CUDA Version        : 13.0"]
    return script(
        path,
        f'echo "$*" >> {path}.asked',
        'case "$1" in',
        *("--query-gpu=*) cat <<'END'", *rows, "END", ";;"),
        *("-L) cat <<'END'", *listed, "END", ";;"),
        *("-q) cat <<'END'", *report, "END", ";;"),
        "*) exit 2;;",
        "esac",
    )


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def nvml(directory: Path, *options: str) -> Path:
    """A directory with a libnvidia-ml.so.1 that ``nvml.c`` describes."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", *options, "-o", str(library), str(HERE / "nvml.c")], check=True
    )
    return directory


def described(*cards: Card) -> str:
    """These GPUs as ``nvml.c`` reads them."""
    return ";".join(
        "|".join([c.uuid, c.name, c.capability, str(c.memory), ",".join(c.parts)]) for c in cards
    )
