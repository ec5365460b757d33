"""In a fresh process that has torch: import one peer, load its op and call it, timed.

``child_first_use.py PEER``: PEER is a module of ``peers``. CPU seconds are those of this process
and of the compilers that it waited for.
"""

import importlib
import json
import resource
import sys
import time

import torch  # noqa: F401 - so that its import is no part of what is timed
from peers import axpb


def cpu_seconds() -> float:
    """User and system time so far, with that of finished children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def main(name: str) -> None:
    """Time the import, and the rest up to a checked result."""
    peer = importlib.import_module(f"peers.{name}")
    if axpb.has_gpu():  # the context and torch's own kernels are no part of it
        axpb.check(lambda x, a, b: a * x + b)
    begin = time.perf_counter()
    peer.bring()
    brought, used = time.perf_counter(), cpu_seconds()
    peer.check(peer.load())
    end = time.perf_counter()
    answer = {"import": brought - begin, "wall": end - brought, "cpu": cpu_seconds() - used}
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


main(sys.argv[1])
