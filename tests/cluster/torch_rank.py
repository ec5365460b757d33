"""One rank with torch, as a program: agrees on three ops in three ways, and says what came of it.

Importing torch takes longer than all of it, so one job does it all.
"""

import json
import os
import time

import cluster_ops
import torch
from torch import distributed

import opkiln
from opkiln import settings

rank = int(os.environ["RANK"])
ones = torch.ones(3)


def native(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"cluster_ops::{name}", "CPU"))


def used(name: str, factor: int) -> bool:
    """Whether the op is native, after a call."""
    assert torch.equal(getattr(cluster_ops, name)(ones), ones * factor)
    return native(name)


said: dict = {}
# Before the program has a process group: through the store that it will make.
began = time.monotonic()
agreed = opkiln.ensure(cluster_ops.twice, timeout=200, lease=10)
said["cold"] = [*agreed[0], used("twice", 2), time.monotonic() - began]

# The third rank wants its reference, so all run theirs.
with settings.override(mode="reference" if rank == 2 else "auto"):
    agreed = opkiln.ensure([cluster_ops.thrice], timeout=200, lease=10)
said["reference"] = [*agreed[0], used("thrice", 3)]

# In the background, with steps of different lengths.
distributed.init_process_group("gloo")
handle = opkiln.ensure(cluster_ops.fourfold, wait=False, timeout=200, lease=10)
said["before"] = used("fourfold", 4)
step = 0
while (agreed := handle.switch()) is None:
    step += 1
    time.sleep(0.02 * (rank + 1))
    assert not used("fourfold", 4)
said["switched"] = [*agreed[0], step, used("fourfold", 4)]

began = time.monotonic()
agreed = opkiln.ensure([cluster_ops.twice, cluster_ops.fourfold], group=distributed.group.WORLD)
said["warm"] = [each.how for each in agreed]
said["warm_seconds"] = time.monotonic() - began
distributed.barrier()
distributed.destroy_process_group()
print(json.dumps(said), flush=True)
