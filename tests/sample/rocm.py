"""A ROCm that is made of scripts: enough of one to be found, asked and chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opkiln.base.build_model import Toolchain
from opkiln.machine.uname import architecture

if TYPE_CHECKING:
    from pathlib import Path

# It answers as hipcc does: for NVIDIA, unless it is told otherwise; its clang knows what it knows.
_HIPCC = """\
#!/bin/sh
echo "$*" >> '{log}'
env >> '{log}.env'
if [ "$HIP_PLATFORM" != amd ]; then echo 'HIP version: {version}'; echo 'nvcc: NVIDIA'; exit 0; fi
case "$*" in
  --version) echo 'HIP version: {version}'; echo 'clang version 18.0.0'; echo 'Target: {machine}' ;;
  *gfx1200*) echo "clang: error: invalid target ID 'gfx1200'; format is a name" >&2; exit 1 ;;
  *-###*)
    libraries='"-mlink-builtin-bitcode" "{home}/amdgcn/bitcode/hip.bc"'
    headers='"-internal-isystem" "{home}/include" "-internal-isystem" "/no/such/directory"'
    echo ' "{home}/llvm/bin/clang-18" "-cc1"' "$libraries" "$headers"
    echo ' "{home}/llvm/bin/lld" "-flavor" "gnu"'
    echo ' "{home}/llvm/bin/ld" "-L{home}/lib" "-lamdhip64"' ;;
  *) {compiling} ;;
esac
"""


class Rocm:
    """One installation below ``home``."""

    def __init__(
        self,
        home: Path,
        version: str = "6.2.41133-dd7f95766",
        *,
        machine: str = f"{architecture()}-unknown-linux-gnu",
        compiling: str = "exit 0",
    ) -> None:
        self.home = home
        self.hipcc = home / "bin" / "hipcc"
        self.log = home / "hipcc.log"
        for name in ("llvm/bin/clang-18", "llvm/bin/lld", "llvm/bin/ld", "llvm/lib/libLLVM-18.so",
                     "amdgcn/bitcode/hip.bc", "amdgcn/bitcode/oclc_isa_version_90a.bc",
                     "amdgcn/bitcode/oclc_isa_version_1100.bc", "include/hip/hip_runtime.h",
                     "amdgcn/bitcode/oclc_isa_version_942.bc", "lib/libamdhip64.so"):  # fmt: skip
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(os.path.basename(name))
        self.hipcc.parent.mkdir()
        self.hipcc.write_text(_HIPCC.format(
            log=self.log, home=home, version=version, machine=machine, compiling=compiling,
        ))  # fmt: skip
        self.hipcc.chmod(0o755)

    def runs(self) -> list[str]:
        """The arguments of every run so far."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def a_host(
    machine: str = f"{architecture()}-linux-gnu", include_dirs: tuple[str, ...] = ()
) -> Toolchain:
    """A host compiler's record, of which only what decides here is true."""
    return Toolchain(
        family="gcc", cxx="/usr/bin/g++", version="g++ 12", machine=machine, identity="host",
        accepts=frozenset(), include_dirs=include_dirs,
    )  # fmt: skip
