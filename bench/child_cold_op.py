"""Builds one library of the catalogue in this process, as a first call would, and answers with the
seconds that it took. torch and the op's functions are imported before: whoever calls has them."""

from __future__ import annotations

import json
import os
import sys
import time

from opkiln.builder.registry import ALL_OPS
from opkiln.cli.main import cli


def clocks() -> tuple[float, float]:
    """(CPU seconds of this process and of those it waited for, wall seconds)."""
    now = os.times()
    return sum(now[:4]), time.perf_counter()


def main() -> None:
    """``child_cold_op.py LIBRARY TARGET``."""
    library, target = sys.argv[1:]
    ALL_OPS[library].FUNCTIONS.import_module()
    cpu, wall = clocks()
    cli.main(["build", library, "--target", target], prog_name="opkiln", standalone_mode=False)
    after = clocks()
    answer = {"cpu": after[0] - cpu, "wall": after[1] - wall}
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
