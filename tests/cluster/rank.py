"""One rank, as a program: calls ``opkiln.ensure``, uses the op, and says what came of it.

Its one argument is JSON: ``store`` (a directory; left out: what the launcher says), ``timeout``,
``at`` (a step of the protocol), ``signal`` (what this process sends itself there) or ``pause`` (how
long it sleeps there), ``once`` (a file: only the rank that makes it does so).
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
        if (once := options.get("once")) is not None:
            try:
                fd = os.open(once, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                return  # another rank was first
            os.write(fd, str(os.getpid()).encode())
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


def struck_around(name: str) -> None:
    function = getattr(work.Worker, name)

    def within(self, *args):
        strike(f"before {name}")
        result = function(self, *args)
        strike(f"after {name}")
        return result

    setattr(work.Worker, name, within)


for name in ("make", "_send", "_import"):
    struck_around(name)

import cluster_ops  # noqa: E402 (what it imports is changed above)

began = time.monotonic()
arguments = {name: options[name] for name in ("store", "timeout") if name in options}
arguments["lease"] = 1.5
said = {"rank": os.environ["RANK"]}
try:
    agreed = opkiln.ensure(cluster_ops.OP, **arguments)
    said["choices"] = [list(each) for each in agreed]
    said["seconds"] = time.monotonic() - began
    assert cluster_ops.OP().load().value() == 23
except opkiln.errors.OpkilnError as error:
    said["error"] = str(error)
    said["seconds"] = time.monotonic() - began
print(json.dumps(said), flush=True)
