"""In a fresh process: time ``import opkiln`` and say which modules it brought.

Nothing is imported first but what the interpreter has built in, so that no module of the standard
library that opkiln needs comes for free.
"""

import sys
import time


def mark(name: str) -> None:
    """Leave a system call that a trace can be cut at."""
    try:
        sys.modules["posix"].stat(f"/opkiln-bench-{name}")
    except FileNotFoundError:
        pass


def main() -> None:
    """Time the import, then say what came with it."""
    before = set(sys.modules)
    mark("import")
    begin = time.perf_counter()
    import opkiln  # noqa: F401

    seconds = time.perf_counter() - begin
    mark("end")
    brought = sorted(set(sys.modules) - before)

    import json

    known = {"opkiln", *sys.stdlib_module_names}
    foreign = [name for name in brought if name.partition(".")[0] not in known]
    answer = {"import": seconds, "modules": brought, "foreign": foreign}
    print("BENCH-ANSWER " + json.dumps(answer), flush=True)


main()
