"""DeepSpeed and what it imports in one folder, for a machine where nothing can be installed.

    python tests/with_deepspeed/folder.py [--to FOLDER] [--python 3.12]
    PYTHONPATH=src:FOLDER python tests/gpu/deepspeed_front_ends.py    # there

torch and numpy are not in it: that machine has its own. The interpreter that runs this needs torch
and setuptools, as DeepSpeed's setup does; nothing is compiled.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from run import DEEPSPEED, REPOSITORY

NEEDED = ("einops", "hjson", "msgpack", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm")
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=REPOSITORY / ".deepspeed" / "packages")
    parser.add_argument("--python", default="3.12", help="the release of Python over there")
    parser.add_argument("--machine", default=os.uname().machine, help="what uname -m says there")
    options = parser.parse_args()
    shutil.rmtree(options.to, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--target", str(options.to)]
    wheels = ["--only-binary=:all:", "--python-version", options.python]
    wheels += [word for each in PLATFORMS for word in ("--platform", f"{each}_{options.machine}")]
    subprocess.run([*pip, *wheels, *NEEDED], check=True)
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "--no-deps", *DEEPSPEED], env=environment, check=True)
    size = sum(file.stat().st_size for file in options.to.rglob("*") if file.is_file()) / 2**20
    print(f"{options.to}: {size:.0f} MiB")


if __name__ == "__main__":
    main()
