"""Train a small model on all ranks of a job. Each rank calls ``opkiln.ensure`` once, first.

It is the same program for all recipes of this directory: torchrun.sh, slurm.sbatch, job.yaml and
jobset.yaml. Ray has its own (ray_train.py), because there a function is started, not a program.
"""

import os

import torch
from torch import distributed

import opkiln


def place() -> tuple[int, int]:
    """The rank and the number of ranks: torchrun's, or srun's."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(rank), int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))


def main() -> None:
    (choice,) = opkiln.ensure("cpu_adam")  # one build in the job, one library on all ranks
    rank, world = place()
    distributed.init_process_group("gloo", rank=rank, world_size=world)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    optimizer = opkiln.optim.CPUAdam(model.parameters(), lr=1e-3)
    torch.manual_seed(rank + 1)
    data, target = torch.randn(512, 64), torch.randn(512, 1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()

    # All ranks have the same weights if all of them ran the same library.
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = weights.clone()
    distributed.broadcast(first, 0)
    assert torch.equal(weights, first), "the ranks have different weights"
    library = choice.digest[:16] or "none"
    print(f"rank {rank} of {world}: cpu_adam {choice.how}, library {library}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
