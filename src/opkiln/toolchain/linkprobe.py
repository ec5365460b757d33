"""Whether a function can be linked: asked of the compiler, once."""

from __future__ import annotations

import os
import re

from opkiln.errors import UsageError
from opkiln.settings import settings
from opkiln.toolchain import host

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def can_link(
    memory: tuple[str, ...],
    function: str,
    libraries: tuple[str, ...],
    directories: tuple[str, ...] = (),
) -> bool:
    """Whether a program that calls ``function`` links with ``libraries``. Raises ToolchainError."""
    from opkiln.process import run

    if not _IDENTIFIER.match(function):
        raise UsageError(f"{function!r} is not the name of a C function")
    toolchain = host.choose(memory)
    from opkiln.toolchain import probing

    with probing.scratch() as scratch:
        source = os.path.join(scratch, "probe.cpp")
        with open(source, "w") as file:
            file.write(f'extern "C" char {function}();\nint main() {{ return {function}(); }}\n')
        search = [f"-L{path}" for path in (*directories, *settings.library_path)]
        named = [f"-l{name}" for name in libraries]
        output = os.path.join(scratch, "probe")
        argv = (toolchain.cxx, source, "-o", output, *search, *settings.ldflags, *named)
        return run(argv, tmpdir=scratch, timeout=60, supervised=False).returncode == 0
