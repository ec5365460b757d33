"""Logins that other tools keep: docker's config.json and its helpers, netrc.

opkiln has no logins of its own, and writes none.
"""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from opkiln.errors import ToolchainError
from opkiln.remote.tier import Unreachable, refuse_malformed
from opkiln.run import process
from opkiln.settings import settings, whole_environment

_DOCKER_HUB = "https://index.docker.io/v1/"  # the name that docker's own registry has there
_HELPER_TIME = 2.0  # seconds that a credential helper may take


class Login(NamedTuple):
    """A name and a password, or a token in their place."""

    user: str
    password: str
    identity_token: str = ""
    place: str = ""  # where it was found

    @property
    def basic(self) -> str:
        """The value of an Authorization header; empty if there is only a token."""
        if self.identity_token:
            return ""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    def __str__(self) -> str:
        return f"the login of {self.user or 'a token'} from {self.place}"


def registry_login(host: str) -> Login | None:
    """The login for a registry, as docker, podman and skopeo find it."""
    for path in registry_files():
        with suppress(FileNotFoundError), refuse_malformed(path):
            with open(path, encoding="utf-8") as file:
                found = _find_in_config(json.load(file), host)
            if found:
                return found._replace(place=found.place or path)
    return None


def registry_files() -> list[str]:
    """The files that may have logins for registries."""
    files = [settings.registry_auth_file] if settings.registry_auth_file else []
    directory = settings.docker_config or (settings.home and os.path.join(settings.home, ".docker"))
    return [*files, os.path.join(directory, "config.json")] if directory else files


def _find_in_config(config: dict[str, Any], host: str) -> Login | None:
    names = [host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/"]
    names += [_DOCKER_HUB] if host in ("docker.io", "registry-1.docker.io") else []
    helpers, auths = config.get("credHelpers") or {}, config.get("auths") or {}
    for name in names:
        if (helper := helpers.get(name) or config.get("credsStore")) and (
            found := _ask(helper, name)
        ):
            return found
        entry = auths.get(name)
        if isinstance(entry, dict) and entry:
            if token := entry.get("identitytoken"):
                return Login("", "", str(token))
            try:
                text = base64.b64decode(entry.get("auth", "")).decode()
            except ValueError:
                continue
            user, colon, password = text.partition(":")
            if colon:
                return Login(user, password.rstrip("\0"))
    return None


def _ask(helper: str, host: str) -> Login | None:
    """The login from a credential helper; None if it has none for the host."""
    if "/" in helper:
        raise Unreachable(f"docker's config.json names {helper!r}, which is not a helper's name")
    program = f"docker-credential-{helper}"
    try:
        done = process.capture(
            [program, "get"], env=whole_environment(), timeout=_HELPER_TIME, given=host.encode()
        )
    except ToolchainError as error:
        raise Unreachable(f"{program}: {error.what}") from error
    if done.returncode:
        return None
    try:
        told = json.loads(done.output)
        user, secret = str(told["Username"]), str(told["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreachable(f"{program} gave no login: {type(error).__name__}") from error
    if user == "<token>":
        return Login("", "", secret, program)
    return Login(user, secret, place=program)


def web_login(host: str) -> Login | None:
    """The login for a web server (``host:port``), from netrc. ``default`` is not used: it is for
    hosts that nobody named."""
    import netrc

    host = urlsplit(f"//{host}").hostname or ""
    for path in web_files():
        try:
            found = netrc.netrc(path).hosts.get(host)
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
            raise Unreachable(f"{path} cannot be read: {type(error).__name__}") from error
        if found:
            return Login(found[0], found[2] or "", place=path)
    return None


def web_files() -> list[str]:
    """The files that may have logins for web servers."""
    path = settings.netrc or (settings.home and os.path.join(settings.home, ".netrc"))
    return [path] if path else []
