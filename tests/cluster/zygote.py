"""Forks ranks from a process that has torch: importing it for each would take longer than all else.

Reads a line of JSON for each rank: ``env``, ``cwd``, ``options`` (those of rank.py), ``out``.
Prints the number of each process, and when it ends its status.
"""

import json
import os
import runpy
import sys
import threading

import torch.distributed  # noqa: F401 (what the ranks need)

import opkiln.cluster.ensure
import opkiln.cluster.work  # noqa: F401 (the same)

HERE = os.path.dirname(os.path.abspath(__file__))


def tell(**facts: object) -> None:
    # In one write: several threads tell, and a child must not inherit a buffer.
    os.write(1, f"{json.dumps(facts)}\n".encode())


def rank(given: dict) -> None:
    out = os.open(given["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    sys.path.insert(0, given["cwd"])
    sys.argv = ["rank.py", json.dumps(given["options"])]
    try:
        runpy.run_path(os.path.join(HERE, "rank.py"), run_name="__main__")
    except BaseException as error:
        print(json.dumps({"crash": repr(error)}), flush=True)
        os._exit(1)
    os._exit(0)


def wait_for(pid: int, number: int) -> None:
    _, status = os.waitpid(pid, 0)
    tell(rank=number, code=os.waitstatus_to_exitcode(status))


tell(ready=os.uname().nodename)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        rank(asked)
    tell(rank=asked["rank"], pid=child)
    threading.Thread(target=wait_for, args=(child, asked["rank"]), daemon=True).start()
