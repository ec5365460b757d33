"""In a fresh process that has torch: load an extension that is built, timed and marked for strace.

``child_hit.py SOURCE ABI`` loads it by ``opkiln.load``, ``child_hit.py /PATH/OF/IT.so`` as a bare
library. The answer has the seconds, the path, and the modules that the load imported.
"""

import gc
import json
import os
import sys
import time

import torch


def mark(name: str) -> None:
    """Leave a system call that a trace can be cut at."""
    try:
        os.stat(f"/opkiln-bench-{name}")
    except FileNotFoundError:
        pass


def main(what: str, abi: str = "") -> None:
    if abi:
        import opkiln

        _ = opkiln.load  # names are resolved when they are used: this is import time
    gc.freeze()  # a collection of all that torch has made is not part of a load
    before = len(sys.modules)
    mark("load")
    begin = time.perf_counter()
    if abi:
        path = opkiln.load("hit", [what], is_python_module=False, abi=abi)
    else:
        torch.ops.load_library(path := what)
    taken = time.perf_counter() - begin
    mark("end")
    answer = {"load": taken, "path": str(path), "modules": len(sys.modules) - before}
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


main(*sys.argv[1:])
