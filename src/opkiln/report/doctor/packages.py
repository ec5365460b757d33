"""The command by which this system installs a package."""

from __future__ import annotations

import os
import shlex

# The system's own word for itself (ID, ID_LIKE of os-release) -> what installs there.
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


def install(package: str, os_release: str = "/etc/os-release") -> str:
    """Installs what Debian calls ``package``; with sudo where this user is not root."""
    family = next((word for word in _families(os_release) if word in _INSTALLERS), "debian")
    name = _OTHER_NAMES.get(package, {}).get(family, package)
    return as_root(f"{_INSTALLERS[family]} {shlex.quote(name)}")


def as_root(command: str) -> str:
    """The command, with sudo where this user needs it."""
    return command if os.geteuid() == 0 else f"sudo {command}"


def _families(os_release: str) -> list[str]:
    found: dict[str, str] = {}
    try:
        with open(os_release, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.strip().partition("=")
                found[name] = value.strip("\"'")
    except OSError:
        pass  # a minimal image has none
    return [found.get("ID", ""), *found.get("ID_LIKE", "").split()]
