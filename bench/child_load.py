"""In a fresh process: import torch, then import one peer and load its op, each timed.

``child_load.py PEER``: PEER is a module of ``peers``. The stats of paths that do not exist mark
the sections for strace; they lie outside what is timed.
"""

import importlib
import json
import os
import sys
import time

import torch  # noqa: F401 - so that its import is no part of what is timed


def mark(name: str) -> None:
    """Leave a system call that a trace can be cut at."""
    try:
        os.stat(f"/opkiln-bench-{name}")
    except FileNotFoundError:
        pass


def main(name: str) -> None:
    """Time the two halves, then use what was loaded, so that a load that did nothing shows."""
    peer = importlib.import_module(f"peers.{name}")
    mark("import")
    begin = time.perf_counter()
    peer.bring()
    brought = time.perf_counter()
    mark("load")
    before_load = time.perf_counter()
    module = peer.load()
    loaded = time.perf_counter()
    mark("end")
    peer.check(module)
    answer = {"import": brought - begin, "load": loaded - before_load}
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


main(sys.argv[1])
