"""In a fresh process that has torch: load one op of the catalogue, timed.

``child_catalogue.py OP`` loads it by its builder, ``child_catalogue.py /PATH/OF/OP.so`` as a bare
library. The answer has the seconds and the library's path.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch


def main(what: str) -> None:
    # Whether a collection of all that torch has made falls into the load is luck, and it takes as
    # long as the load. This keeps torch's objects out of it; those of the load count.
    gc.freeze()
    if what.startswith("/"):
        begin = time.perf_counter()
        torch.ops.load_library(what)
        taken = time.perf_counter() - begin
        path = what
    else:
        from opkiln import get_builder  # as in peers/opkiln_cpu_adam.py: this is import time

        gc.freeze()
        begin = time.perf_counter()
        get_builder(what).load()
        taken = time.perf_counter() - begin
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split(maxsplit=5)[5] for line in maps if line.endswith(f"/{what}.so")}
        (path,) = mapped
    print("\nBENCH-ANSWER " + json.dumps({"load": taken, "path": path}), flush=True)


main(sys.argv[1])
