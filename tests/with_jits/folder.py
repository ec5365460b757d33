"""FlashInfer and what it imports in one archive, for a machine where nothing can be installed.

    python tests/with_jits/folder.py [--to FILE] [--python 3.12]
    mkdir there; tar -xJf FILE -C there      # over there
    PYTHONPATH=src:there python tests/gpu/flashinfer_modules.py

torch, numpy and the CUDA toolkit are not in it: that machine has its own. Of FlashInfer's data, it
has the headers and the sources of small modules: 15 MiB, and not 430.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from run import FLASHINFER, IMPORTED, REPOSITORY, TVM_FFI

PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
KEPT = ("include", "cccl", "csrc")  # of flashinfer/data; of csrc, what lies in no folder


def wanted(path: Path) -> bool:
    """Whether a file goes into the archive; its path is relative."""
    parts = path.parts
    if parts[0] in ("b12x", "bin", "include", "build_utils.py", "build_backend.py"):
        return False
    if parts[:2] != ("flashinfer", "data"):
        return path.suffix not in (".cubin", ".pyc", ".a")
    return parts[2] in KEPT and not (parts[2] == "csrc" and len(parts) > 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=REPOSITORY / ".flashinfer" / "packages.tar.xz")
    parser.add_argument("--python", default="3.12", help="the release of Python over there")
    parser.add_argument("--machine", default=os.uname().machine, help="what uname -m says there")
    asked = parser.parse_args()
    asked.to.parent.mkdir(exist_ok=True)
    wheels = ["--only-binary=:all:", "--python-version", asked.python]
    wheels += [word for each in PLATFORMS for word in ("--platform", f"{each}_{asked.machine}")]
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        pip += ["--no-deps", "--target", place, *wheels]
        more = ("urllib3", "idna", "certifi", "charset-normalizer", "markupsafe", "click")
        subprocess.run([*pip, TVM_FFI, FLASHINFER, *IMPORTED, *more], check=True)
        with tarfile.open(asked.to, "w:xz") as archive:
            for file in sorted(Path(place).rglob("*")):
                name = file.relative_to(place)
                if file.is_file() and wanted(name):
                    archive.add(file, str(name))
    print(f"{asked.to}: {asked.to.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
