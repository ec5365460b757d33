"""One rank, as a program: calls ``opkiln.ensure``, uses the op, and says what came of it.

Its one argument is JSON: ``store`` (a directory; left out: what the launcher says), ``timeout``,
``at`` (a step of the protocol) and ``signal`` (what this process sends itself there).
"""

import json
import os
import sys
import time

import opkiln
from opkiln.cluster import protocol, work

options = json.loads(sys.argv[1])


def named(action) -> str:
    where = getattr(action, "key", "")
    return f"{type(action).__name__} {where}".strip()


def strike(step: str) -> None:
    if step == options.get("at") and not options.get("struck"):
        options["struck"] = True
        if (pause := options.get("pause")) is not None:
            time.sleep(pause)
        else:
            os.kill(os.getpid(), options["signal"])


def reached(state):
    action = right(state)
    strike(named(action))
    return action


right = protocol.next_action
protocol.next_action = reached
for name in ("make", "_send", "_import"):

    def within(self, *args, _right=getattr(work.Worker, name), _name=name):
        strike(f"before {_name}")
        result = _right(self, *args)
        strike(f"after {_name}")
        return result

    setattr(work.Worker, name, within)

import cluster_ops  # noqa: E402 (it may import torch)

began = time.monotonic()
arguments = {name: options[name] for name in ("store", "timeout") if name in options}
said = {"rank": os.environ["RANK"]}
try:
    agreed = opkiln.ensure(cluster_ops.OP, **arguments)
    said["choices"] = [list(each) for each in agreed]
    said["seconds"] = time.monotonic() - began
    if hasattr(cluster_ops.OP, "load") and hasattr(cluster_ops, "Tensor"):
        import torch

        assert torch.equal(cluster_ops.OP(torch.ones(3)), torch.full((3,), 2.0))
        said["native"] = torch._C._dispatch_has_kernel_for_dispatch_key("cluster_ops::twice", "CPU")
    else:
        assert cluster_ops.OP().load().value() == 23
except opkiln.errors.OpkilnError as error:
    said["error"] = str(error)
    said["seconds"] = time.monotonic() - began
print(json.dumps(said), flush=True)
