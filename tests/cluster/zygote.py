"""Forks ranks from a process that has torch: importing it for each would take longer than all else.

It is asked by a line of JSON for each rank: ``rank``, ``env``, ``cwd``, ``options`` (those of
rank.py), ``out``. Without an argument, it reads them from its input, and prints the number of each
process and, when it ends, its status. With the path of a socket, each connection asks for one rank
(forked.py), and is told its status; a rank whose connection ends is killed.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading

import torch.distributed  # noqa: F401 (what the ranks need)

import opkiln.cluster.ensure
import opkiln.cluster.work  # noqa: F401 (the same)

HERE = os.path.dirname(os.path.abspath(__file__))


def tell(**facts: object) -> None:
    # In one write: several threads tell, and a child must not inherit a buffer.
    os.write(1, f"{json.dumps(facts)}\n".encode())


def forked(given: dict) -> int:
    """The number of the process that is this rank."""
    if (child := os.fork()) != 0:
        return child
    out = os.open(given["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    sys.path[:0] = [given["cwd"], *given["env"].get("PYTHONPATH", "").split(os.pathsep)]
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


def answer(pid: int, connection: socket.socket) -> None:
    """Tell the status of a rank; kill it if nobody waits for it any more."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if select.select([connection], [], [], 0.05)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
    try:
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    except BrokenPipeError:
        return  # it ended at the same time


def serve(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        tell(ready=os.uname().nodename)
        while True:
            connection, _ = server.accept()
            pid = forked(json.loads(connection.makefile().readline()))
            threading.Thread(target=answer, args=(pid, connection), daemon=True).start()


gc.freeze()  # a collection in a rank would write to all of torch's objects
if len(sys.argv) > 1:
    serve(sys.argv[1])
tell(ready=os.uname().nodename)
for line in sys.stdin:
    asked = json.loads(line)
    child = forked(asked)
    tell(rank=asked["rank"], pid=child)
    threading.Thread(target=wait_for, args=(child, asked["rank"]), daemon=True).start()
