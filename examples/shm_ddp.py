"""Two ranks train one model on the CPU; their gradients meet in shared memory.

python examples/shm_ddp.py
"""

import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import opkiln


def train(rank: int, size: int, port: int) -> None:
    dist.init_process_group(
        opkiln.comm.register_backend(),  # "opkiln_shm"; the rest is as with "gloo"
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 16)[rank::size]
    for _ in range(100):
        loss = (model(x).squeeze() - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    every = [torch.empty(1, 16) for _ in range(size)]
    dist.all_gather(every, model.module.weight.detach())
    assert loss < 0.01
    assert torch.equal(every[0], every[1])
    if rank == 0:
        print("both ranks have the same weights")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (2, port), nprocs=2)
