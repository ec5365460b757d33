"""Commands for users to copy: installing a package of the system or of this Python."""

from __future__ import annotations

import os
import shlex
import sys

from opkiln.report.machine import read_release

# The name of a system (ID or ID_LIKE in os-release) -> the command that installs a package.
_INSTALLERS = {
    "debian": "apt-get install -y",
    "ubuntu": "apt-get install -y",
    "fedora": "dnf install -y",
    "rhel": "dnf install -y",
    "alpine": "apk add",
    "arch": "pacman -S --noconfirm",
    "suse": "zypper install -y",
}
_OTHER_NAMES = {
    "g++": {"fedora": "gcc-c++", "rhel": "gcc-c++", "suse": "gcc-c++", "arch": "gcc"},
    "python3-dev": {"fedora": "python3-devel", "rhel": "python3-devel", "suse": "python3-devel",
                    "arch": "python"},
}  # fmt: skip


def install_command(package: str, os_release: str = "/etc/os-release") -> str:
    """The command that installs what Debian calls ``package``; with sudo if this is not root."""
    system = read_release(os_release)
    families = (system.get("ID", ""), *system.get("ID_LIKE", "").split())
    family = next((word for word in families if word in _INSTALLERS), "debian")
    name = _OTHER_NAMES.get(package, {}).get(family, package)
    return root_command(f"{_INSTALLERS[family]} {shlex.quote(name)}")


def root_command(command: str) -> str:
    """The command, with sudo if this user is not root."""
    return command if os.geteuid() == 0 else f"sudo {command}"


def interpreter() -> str:
    """This Python, as a command: ``python`` if that is what PATH finds."""
    from opkiln.machine.toolchain import find

    program = sys.executable or "python3"
    for name in ("python", "python3"):
        # Compares paths, not files: the Python of a virtual environment is a link to the system's.
        if find.find_program(name) == program:
            return name
    return shlex.quote(program)


def pip_command(*words: str) -> str:
    """A pip command for the environment of this interpreter."""
    return f"{interpreter()} -m pip {shlex.join(words)}"


def use_this_python(command: str) -> str:
    """A hint that starts with ``pip``, for this interpreter; other commands are unchanged."""
    return f"{interpreter()} -m {command}" if command.startswith("pip ") else command


def unset_command(origin: str) -> str:
    """``unset CXX`` for what a variable set; empty if no variable but PATH led there."""
    return f"unset {origin}" if origin.isupper() and origin != "PATH" else ""
