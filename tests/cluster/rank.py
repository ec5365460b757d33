"""One rank, as a program: calls ``opkiln.ensure``, uses the op, and says what came of it.

Its one argument is JSON:

    store, timeout, lease   as for ``ensure``; without a store, what the launcher says
    ops                     which ops of cluster_ops; else OP
    part                    the bytes of a part of a bundle, so that a small one has several
    out                     the beginning of a file's name: what is said is written there, too
    at                      a step: this rank is struck there
    nth                     at the so-manieth time that it comes to this step; else the first
    signal, pause           what it sends itself there; or how long it sleeps
    delay                   how long it waits before the signal
    mark                    a file: when the signal was sent, by the clock that only goes forward
    once                    a file: only the rank that makes it is struck
    also                    more strikes, each with these seven
"""

import json
import os
import sys
import time

import opkiln
from opkiln.cluster import channel, protocol, stores, work
from opkiln.run import events

options = json.loads(sys.argv[1])
strikes = [options, *options.get("also", ())]
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
channel.PART = options.get("part", channel.PART)
said: dict = {"rank": rank, "pid": os.getpid(), "compiles": 0, "built": {}}
last: list[str] = []  # the action before this one


def reach(step: str) -> None:
    for strike in strikes:
        if step == strike.get("at"):
            strike["reached"] = strike.get("reached", 0) + 1
            if strike["reached"] == strike.get("nth", 1):
                happen(strike)


def happen(strike: dict) -> None:
    if (once := strike.get("once")) is not None:
        try:
            fd = os.open(once, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return  # another rank was first
        os.write(fd, str(os.getpid()).encode())
    if (pause := strike.get("pause")) is not None:
        time.sleep(pause)
        return
    time.sleep(strike.get("delay", 0))
    if (mark := strike.get("mark")) is not None:
        with open(mark, "w") as file:
            file.write(str(time.monotonic()))
    os.kill(os.getpid(), strike["signal"])


def named(action) -> str:
    where = getattr(action, "key", "")
    return f"{type(action).__name__} {where}".strip()


def next_action(state):
    """As the shipped one; an action that was done before is reached "after" it."""
    for done in last:
        reach(f"after {done}")
    if state.phase == protocol.LINGER:
        reach("linger")
    action = right(state)
    last[:] = [named(action)]
    reach(named(action))
    return action


right = protocol.next_action
protocol.next_action = next_action


def watched(owner, name: str) -> None:
    """Steps before and after a function."""
    function = getattr(owner, name)

    def within(*args, **kwargs):
        reach(f"before {name}")
        result = function(*args, **kwargs)
        reach(f"after {name}")
        return result

    setattr(owner, name, within)


for owner, name in (
    (work.Worker, "make"), (work.Worker, "_send"), (work.Worker, "fetch"),
    (work.Worker, "_import"), (work, "unpack_bytes"),
):  # fmt: skip
    watched(owner, name)


def in_parts(kind: type) -> None:
    """A step before each part of a bundle is written, and before it is read."""
    put, look = kind.put, kind.look

    def put_part(self, key, value):
        if "/bundle/" in key:
            reach(f"write part {key.rpartition('/')[2]}")
        return put(self, key, value)

    def look_at_part(self, keys):
        if "/bundle/" in keys[0]:
            reach(f"read part {keys[0].rpartition('/')[2]}")
        return look(self, keys)

    kind.put, kind.look = put_part, look_at_part


in_parts(stores.SharedDirectory)
in_parts(stores.Torch)


def heard(event: events.Event) -> None:
    if event.kind == events.STEP_END and event.data["label"] not in events.NO_COMPILES:
        said["compiles"] += not event.data["cached"]
        reach("compiled")
    elif event.kind == events.BUILD_END:
        said["built"][event.data["op"]] = event.data["wall"]


import cluster_ops  # noqa: E402 (what it imports is changed above)

ops = [getattr(cluster_ops, each) for each in options.get("ops", ("OP",))]
arguments = {name: options[name] for name in ("store", "timeout") if name in options}
arguments["lease"] = options.get("lease", 1.5)
said["called"] = time.monotonic()
with events.listen(heard):
    try:
        agreed = opkiln.ensure(ops, **arguments)
        said["choices"] = [list(each) for each in agreed]
    except opkiln.errors.OpkilnError as error:
        said["error"] = str(error)
said["ended"] = time.monotonic()
said["seconds"] = said["ended"] - said["called"]
said["now"] = time.time()
said["restarts"] = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if "choices" in said:
    for op in ops:
        assert op().load().value() == op.VALUE
text = json.dumps(said)
if (out := options.get("out")) is not None:
    with open(f"{out}{rank}", "w") as file:
        file.write(text)
print(text, flush=True)
