"""What one process of ``opkiln demo`` does: train with CPUAdam, then with torch's AdamW.

``main`` writes what it saw to a file, as JSON: what loading the op took and decided, how the
training went, and how far the parameters are from torch's.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

STEPS = 40
_SETTINGS = {"lr": 3e-3, "weight_decay": 0.1}


def main(result: str) -> int:
    """Write the result, or the error that kept it from being; the exit code is the error's."""
    from opkiln.errors import OpkilnError

    try:
        found, code = run(), 0
    except OpkilnError as error:
        found = {"error": {"what": error.what, "why": error.why, "hint": error.hint}}
        code = error.exit_code
    with open(result, "w") as file:
        json.dump(found, file)
    return code


def run() -> dict[str, Any]:
    """Load the op, train twice, compare. Raises OpkilnError where the op cannot be had."""
    began = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from opkiln.builder.registry import get_builder

    op = get_builder("cpu_adam")
    op.jit_load()
    loaded = time.perf_counter()

    from opkiln.loading import loader
    from opkiln.ops.cpu_adam.optimizer import CPUAdam

    ours, losses, seconds = _train(CPUAdam)
    theirs, _, their_seconds = _train(torch.optim.AdamW)
    served = loader.load(op.op())
    assert served.artifact is not None  # jit_load() is native or an error
    return {
        "import_torch": imported - began,
        "load": loaded - imported,
        "candidates": [decision[:3] for decision in served.trace.candidates],
        "entry": served.artifact.path,
        "steps": STEPS,
        "parameters": sum(tensor.numel() for tensor in ours),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "train": seconds,
        "train_torch": their_seconds,
        "difference": max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        "digest": hashlib.sha256(repr([tensor.tolist() for tensor in ours]).encode()).hexdigest(),
    }


def _train(optimizer: Any) -> tuple[list[Any], list[float], float]:
    """(trained parameters, the loss of each step, seconds); data and start are always the same."""
    import torch

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(512, 64, generator=generator)
    answers = torch.tanh(inputs @ torch.randn(64, 8, generator=generator) / 8)
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )  # fmt: skip
    chosen = optimizer(model.parameters(), **_SETTINGS)
    losses = []
    began = time.perf_counter()
    for _ in range(STEPS):
        chosen.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), answers)
        torch.autograd.backward(loss)
        chosen.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    return [param.detach() for param in model.parameters()], losses, seconds
