"""DeepSpeed's native sources from PyPI, in a folder that git ignores: ``make deepspeed-sources``.

    python bench/ops/deepspeed_sources.py [--to DIR]

Takes ``csrc``, the kernels of ``inference/v2`` and the front end of the training layer: 3 MB. They
are for ``deepspeed_kernels.py``, also on a machine where nothing can be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.19.8"
FOLDER = Path(__file__).resolve().parents[2] / ".deepspeed"
WANTED = (
    "LICENSE",
    "csrc/",
    "deepspeed/inference/v2/kernels/",
    "deepspeed/ops/transformer/transformer.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="DIR")
    folder: Path = parser.parse_args().to
    with tempfile.TemporaryDirectory() as place:
        archive = _downloaded(Path(place))
        shutil.rmtree(folder / "source", ignore_errors=True)
        _unpack(archive, folder / "source")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"DeepSpeed {VERSION}: {len(files)} files, {size:.1f} MiB, in {folder}")


def _downloaded(place: Path) -> Path:
    """The source archive. pip runs its ``setup.py`` for the name; that needs the torch of here, and
    is told to compile nothing."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", "deepspeed", "--no-build-isolation", "--dest", str(place)]
    subprocess.run(
        [*pip, f"deepspeed=={VERSION}"], env={**os.environ, "DS_BUILD_OPS": "0"}, check=True
    )
    return next(place.glob("deepspeed-*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(WANTED):
                member.name = name
                tar.extract(member, folder, filter="data")


if __name__ == "__main__":
    main()
