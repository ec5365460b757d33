"""A rank of torchrun or srun that a zygote of its node forks; it ends as that one does.

    forked.py OUT OPTIONS        OUT: the beginning of a file's name, for what it prints

The zygote's socket is FORKING_SOCKET. The environment is the launcher's. A rank that is killed ends
this process by the same signal, and if this process is killed, so is the rank.
"""

import json
import os
import socket
import sys

out, options = sys.argv[1:]
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
asked = {
    "rank": rank, "env": dict(os.environ), "cwd": os.getcwd(), "out": out + rank,
    "options": json.loads(options),
}  # fmt: skip
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["FORKING_SOCKET"])
    connection.sendall(f"{json.dumps(asked)}\n".encode())
    code = int(connection.makefile().readline())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
