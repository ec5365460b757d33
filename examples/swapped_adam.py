"""AdamW whose states lie on the disk: three buffers in memory, whatever the size of the model.

    python examples/swapped_adam.py

While one parameter is stepped, the states of the next are read and those of the last are written.
The states take eight bytes per parameter element on the disk; memory holds those of three
parameters. The result is that of a ``CPUAdam`` with everything in memory, bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from opkiln.io import AsyncIO, FileRequest, PinnedPool
from opkiln.optim import CPUAdam

BUFFERS = 3  # one is read to, one is stepped with, one is written


class SwappedAdam:
    """``CPUAdam`` for each parameter, with its two states in a file between its steps."""

    def __init__(self, params: list[nn.Parameter], directory: str, **options: Any) -> None:
        self.params = params
        self.adams = [CPUAdam([each], **options) for each in params]
        self.paths = [os.path.join(directory, f"{i}.bin") for i in range(len(params))]
        for path, param in zip(self.paths, params, strict=True):
            with open(path, "wb") as file:
                file.truncate(8 * param.numel())  # zeros that take no room yet
        self.files = AsyncIO()
        self.pool = PinnedPool("cpu", lock=False)
        largest = max(each.numel() for each in params)
        self.buffers = [self.pool.take((2, largest), torch.float32) for _ in range(BUFFERS)]

    def states(self, i: int) -> Tensor:
        """Where the two states of a parameter are while they are in memory."""
        count = self.params[i].numel()
        return self.buffers[i % BUFFERS].view(-1)[: 2 * count].view(2, count)

    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        turns = [i for i, each in enumerate(self.params) if each.grad is not None]
        written: dict[int, FileRequest] = {}  # by buffer

        def read(i: int) -> FileRequest:
            if (before := written.pop(i % BUFFERS, None)) is not None:
                before.wait()  # the buffer is free when its last states are on the disk
            return self.files.read(self.states(i), self.paths[i])

        coming = read(turns[0]) if turns else None
        for now, i in enumerate(turns):
            assert coming is not None
            coming.wait()
            busy = i % BUFFERS
            follows = turns[now + 1] if now + 1 < len(turns) else None
            # A gap in the list may lead to the buffer that is about to be used.
            ahead = follows is not None and follows % BUFFERS != busy
            if ahead:
                assert follows is not None
                coming = read(follows)
            self._step_one(i)
            written[busy] = self.files.write(self.states(i), self.paths[i])
            if follows is not None and not ahead:
                coming = read(follows)
        self.files.wait()

    def _step_one(self, i: int) -> None:
        adam, param = self.adams[i], self.params[i]
        kept = adam.state[param]
        first, second = (each.view(param.shape) for each in self.states(i))
        adam.state[param] = {"step": kept.get("step", 0), "exp_avg": first, "exp_avg_sq": second}
        adam.step()

    def close(self) -> None:
        """Wait for the files, and let the memory go."""
        self.files.close()


def main() -> None:
    torch.manual_seed(0)
    sizes = (64, *[256] * 12, 8)
    model, twin = (nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(128, 64), torch.randn(128, 8)
    with tempfile.TemporaryDirectory() as directory:
        swapped = SwappedAdam(list(model.parameters()), directory, lr=1e-3)
        plain = CPUAdam(twin.parameters(), lr=1e-3)
        for _ in range(20):
            for each, step in ((model, swapped.step), (twin, plain.step)):
                each.zero_grad()
                loss = nn.functional.mse_loss(each(x), y)
                loss.backward()
                step()
        swapped.close()
        stored = sum(os.path.getsize(path) for path in swapped.paths)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    held = sum(each.nbytes for each in swapped.buffers)
    print(f"loss {loss.item():.3f}; {stored} bytes of states on the disk, {held} in memory")
    print("the same parameters as with all states in memory")


if __name__ == "__main__":
    main()
