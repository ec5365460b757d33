"""Every vendor's accelerator against the stand-in of its package: a JSON line for each.

    python -m sample.vendor_conformance DIRECTORY NAME...

``DIRECTORY/NAME`` goes on ``sys.path``. torch takes one such device per process, so each has a
child of its own; torch is imported once, before they fork.
"""

from __future__ import annotations

import json
import os
import sys

import torch._dynamo
import torch.utils.cpp_extension  # noqa: F401 (slow to import, and needed by each of them)

from opkiln.accelerator import detect
from opkiln.settings import override
from sample import conformance


def check(directory: str, name: str) -> dict[str, object]:
    """What is wrong with one of them, once it was asked for by name and found."""
    sys.path.insert(0, os.path.join(directory, name))
    with override(accelerator=name):
        accelerator = detect.get_accelerator()
        wrong = conformance.failures(accelerator, accelerator.module())
        return {"name": accelerator.name, "wrong": wrong, "trace": detect.trace()[-1].why}


def main() -> None:
    directory, *names = sys.argv[1:]
    for name in names:
        child = os.fork()
        if child == 0:
            os.write(1, json.dumps({name: check(directory, name)}).encode() + b"\n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, name


if __name__ == "__main__":
    main()
