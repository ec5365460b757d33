"""What a link reads besides its objects: the author's and the user's libraries and scripts.

No dependency file lists them. So they are found here as the linker finds them: by path, or by name
in the ``-L`` directories. Libraries on the linker's own path belong to the system, and the dynamic
linker finds them again at run time.
"""

from __future__ import annotations

import os

from opkiln.build_model import Plan
from opkiln.record import Record


class Libraries(Record):
    """The files that a link reads, and the names and directories where a new file could shadow
    one of them."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    directories: tuple[str, ...]


def of(plan: Plan) -> Libraries:
    """The libraries that a plan's link names, as they are on disk now."""
    users = dict(plan.target.flags)
    named = (f"-l{name}" for name in (*plan.spec.libraries, *plan.spec.device_libraries))
    flags = (*plan.spec.ldflags, *named, *users.get("ldflags", ()))
    words = [word for flag in flags for word in _words(flag)]
    files, names, directories = [], [], []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-L"):
            directories.append(word[2:] or following)
        elif word.startswith("-l"):
            name = word[2:] or following
            exact = name.startswith(":")
            names += [name[1:]] if exact else [f"lib{name}.so", f"lib{name}.a"]
        else:
            files.append(word.rpartition("=")[2])
    device = plan.toolchain.device
    toolkit = () if device is None else device.library_dirs
    everywhere = (*directories, *toolkit, *users.get("library_path", ()))
    searched = [path for path in everywhere if os.path.isabs(path)]
    files += [os.path.join(directory, name) for directory in searched for name in names]
    present = (path for path in files if os.path.isabs(path) and os.path.isfile(path))
    return Libraries(tuple(dict.fromkeys(present)), tuple(names), tuple(dict.fromkeys(searched)))


def _words(flag: str) -> list[str]:
    return flag.split(",")[1:] if flag.startswith("-Wl,") else [flag]
