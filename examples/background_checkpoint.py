"""Train while a checkpoint is written: the loop stops for the copy alone, not for the disk.

    python examples/background_checkpoint.py                     # a small model
    python examples/background_checkpoint.py --gigabytes 2

The file is in safetensors' layout. It appears in one step: a job that is killed meanwhile finds the
checkpoint before it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch

from opkiln import io
from opkiln.optim import CPUAdam


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.02, help="of parameters and states")
    options = parser.parse_args()
    count = int(options.gigabytes * 1e9 / 12)  # a parameter and two states, of four bytes each
    weight = torch.zeros(count, requires_grad=True)
    target = torch.ones(1000)
    adam = CPUAdam([weight], lr=0.1)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "checkpoint.safetensors")
        saving: io.Saving | None = None
        meanwhile = 0
        for step in range(12):
            adam.zero_grad()
            (weight[:1000] - target).square().sum().backward()
            adam.step()
            if saving is not None and not saving.done():
                meanwhile += 1
            if step == 3:
                state = adam.state[weight]
                tensors = {"weight": weight, "m": state["exp_avg"], "v": state["exp_avg_sq"]}
                began = time.perf_counter()
                saving = io.save_in_background(tensors, path, metadata={"step": str(step)})
                stopped = time.perf_counter() - began
                as_saved = weight.detach()[:1000].clone()
        assert saving is not None
        saving.wait()
        found = io.load(path)
        assert torch.equal(found["weight"][:1000], as_saved)
        assert not torch.equal(weight[:1000], as_saved)
        size = os.path.getsize(path) / 1e6
    print(f"{size:.0f} MB written; training stopped for {stopped:.3f} s")
    print(f"{meanwhile} steps were made meanwhile")


if __name__ == "__main__":
    main()
