"""A fuzzer of the client of remote tiers: whatever a server sends, a load ends in time.

    python tests/faults/hostile_tiers.py DIRECTORY --rounds 2000 --seed 1

It builds one op and publishes it. Then a fresh process with an empty store asks a hostile server
(``hostile_server.py``) for it, in each round another one: by the function that every load calls, or
by those of `opkiln cache pull` and `push`, over real sockets. Every ``LOAD_EVERY`` rounds it is the
whole load, which compiles what it does not get. After each round these must hold:

- it has ended by itself, and nothing of it goes on;
- no error was raised but a StoreError of `push`, and the user was told lines without control
  characters;
- the store has the op as its maker published it, or nothing new;
- no blob was asked for before its signature was verified, and none was longer than it should be;
- no other host has got the login, and no message has it.

The first round that fails ends it: what was said is printed, and the exit status is 1. ``--plant``
breaks opkiln on purpose, to show that it would be found.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from hostile_server import BASIC, IDENTITY, PASSWORD, USER, Conversation, Honest

from opkiln.base.model import Op, OpSpec
from opkiln.decision import search
from opkiln.decision.terms import Request, Trace
from opkiln.errors import StoreError
from opkiln.loading import loader
from opkiln.remote import fetch, lockfile, patience, push, registry, tier, web
from opkiln.remote.plain import read_record
from opkiln.store import signatures, signing
from opkiln.store.zip_format import LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALL_REQUESTS = 1.5  # seconds that the requests of a load may take: OPKILN_BUILD_TIMEOUT
BUFFERS = 24 << 20  # bytes that a server may have sent though nobody reads them
LOAD_EVERY = 50
MORE_TIME = 60.0  # seconds that a whole load may take longer: it has the times of the product
AT_ONCE = 8
ANSWER = 42


class Problem(Exception):
    """Something that must not be."""


class Fuzzer:
    """One published op, and rounds of loads that get it from a hostile server."""

    def __init__(self, where: Path, seed: int, longest: float) -> None:
        self._where, self._seed, self._longest = where, seed, longest
        source = where / "a.cpp"
        source.write_text(f'extern "C" int answer() {{ return {ANSWER}; }}\n')
        self._op = Op(OpSpec("op", "fuzzed", str(where), (source.name,), kind="plain", abi="none"))
        self._honest = self._publish()
        self.outcomes: collections.Counter[str] = collections.Counter()

    def _publish(self) -> Honest:
        private, stranger = str(self._where / "key"), str(self._where / "stranger")
        key = signing.generate(private).key
        signing.generate(stranger)
        os.environ["OPKILN_CACHE_DIR"] = str(self._store(self._where / "builder"))
        built, _ = loader.obtain(Request(self._op))
        self._built, self._sha256 = built.path, built.sha256
        place = self._where / "tier"
        row = push.push(built.path, f"file://{place}", private)
        (self._where / "ops.lock").write_text(lockfile.write([row]))
        record = (place / "ac" / row.name).read_bytes()
        return Honest(
            row.name, row.sha256, (place / "cas" / row.sha256).read_bytes(), json.loads(record),
            json.loads(registry.write_manifest(read_record(record))), key, private, stranger,
        )  # fmt: skip

    def _store(self, path: Path) -> Path:
        """A store without an op, which knows the compilers if the builder does."""
        path.mkdir(0o700, exist_ok=True)
        known = self._where / "builder" / "v1" / "toolchains"
        if known.exists() and not (path / "v1").exists():
            (path / "v1").mkdir(0o700)
            shutil.copytree(known, path / "v1" / "toolchains")
        return path

    def run(self, first: int, rounds: int) -> str:
        """What the first problem is; empty if there is none."""
        numbers = iter(range(first, first + rounds))
        running: dict[int, tuple[int, int, float]] = {}  # number, pipe, since when; by pid
        found = ""
        while not found:
            while len(running) < AT_ONCE and (number := next(numbers, None)) is not None:
                pid, pipe = self._start(number)
                running[pid] = (number, pipe, time.monotonic())
            if not running:
                return ""
            found = self._wait(running)
        for pid, (_, pipe, _) in running.items():
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(pipe)
        return found

    def _wait(self, running: dict[int, tuple[int, int, float]]) -> str:
        """Wait for a round, or for the time after which one is hung. Its problem, if it has any."""
        time.sleep(0.005)
        for pid, (number, pipe, since) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            longest = self._longest + (MORE_TIME if _is_whole(number) else 0)
            if not ended and time.monotonic() - since < longest:
                continue
            if not ended:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            del running[pid]
            with os.fdopen(pipe) as file:
                *journal, last = file.read().removesuffix("\n").split("\n")
            shutil.rmtree(self._where / str(number), ignore_errors=True)
            if not ended:
                last = f"it did not end in {longest:g} s"
            elif status or not last.startswith("+"):
                last = last or f"its process ended with status {status}"
            else:
                self.outcomes[last[1:]] += 1
                continue
            return f"round {number}, seed {self._seed}: {last}\n" + "\n".join(journal)
        return ""

    def _start(self, number: int) -> tuple[int, int]:
        """Run a round in a process of its own, which knows nothing of earlier ones."""
        receiving, sending = os.pipe()
        pid = os.fork()
        if pid:
            os.close(sending)
            return pid, receiving
        os.close(receiving)
        try:
            said = "+" + self._round(number, lambda line: _write_line(sending, line))
        except Problem as problem:
            said = str(problem)
        except BaseException:
            said = traceback.format_exc().replace("\n", " | ")
        _write_line(sending, said)
        os._exit(0)

    def _round(self, number: int, journal: Callable[[str], None]) -> str:
        """What a round comes to. Raises Problem, and whatever the product raises."""
        talk = Conversation(f"{self._seed}-{number}", self._honest, journal)
        place = self._where / str(number)
        os.environ["OPKILN_CACHE_DIR"] = str(self._store(place))
        _log_in(place, talk)
        os.environ["OPKILN_REMOTES"] = talk.url
        os.environ["OPKILN_BUILD_TIMEOUT"] = str(ALL_REQUESTS)
        if talk.locked:
            os.environ["OPKILN_LOCK"] = str(self._where / "ops.lock")
        else:
            os.environ["OPKILN_TRUSTED_KEYS"] = self._honest.key
        request, trace = Request(self._op), Trace()
        lines: list[str] = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if _is_whole(number):
                del os.environ["OPKILN_BUILD_TIMEOUT"]
                artifact, trace = loader.obtain(request)
                if (got := ctypes.CDLL(artifact.path).answer()) != ANSWER:
                    raise Problem(f"the library answers {got}")
                outcome = "loaded"
            elif talk.command == "push":
                outcome = self._push(talk.url, lines)
            elif talk.command == "pull":
                (pulled,) = fetch.pull(
                    lockfile.read(os.environ["OPKILN_LOCK"]), os.environ["OPKILN_LOCK"],
                    [talk.url], str(request.store.root),
                )  # fmt: skip
                lines.append(pulled.reason)
                outcome = self._outcome(request, pulled.status == fetch.NEW)
            else:
                outcome = self._outcome(request, fetch.fetch(request, request.target, trace))
        lines += [str(each.message) for each in told] + [each.reason for each in trace.candidates]
        _check_lines(lines)
        _check_talk(talk, len(self._honest.blob))
        _check_downloads(place / "v1" / "staging", len(self._honest.blob))
        _check_threads(self._longest / 3)
        return outcome

    def _push(self, url: str, lines: list[str]) -> str:
        try:
            push.push(self._built, url, self._honest.private)
        except StoreError as error:
            lines += str(error).split("\n")
            return "not published"
        return "published"

    def _outcome(self, request: Request, found: bool) -> str:
        if not found:
            if os.path.exists(f"{request.store.root}/ops"):
                raise Problem("nothing was fetched, and the store has an entry")
            return "not fetched"
        artifact = search.find_fitting(request, Trace())
        if artifact is None or artifact.sha256 != self._sha256:
            raise Problem(f"something else was fetched: {artifact}")
        return "fetched"


def _is_whole(number: int) -> bool:
    return number % LOAD_EVERY == LOAD_EVERY - 1


def _write_line(pipe: int, line: str) -> None:
    """At once, so that it is there if the process hangs."""
    os.write(pipe, (line.replace("\n", " ") + "\n").encode("utf-8", "backslashreplace"))


def _log_in(place: Path, talk: Conversation) -> None:
    """Write the user's login for the tier, and for no other host."""
    os.environ["DOCKER_CONFIG"], os.environ["NETRC"] = str(place), str(place / "netrc")
    entry = {"identitytoken": IDENTITY} if talk.login == "identity" else {"auth": BASIC}
    if talk.login:
        (place / "config.json").write_text(json.dumps({"auths": {talk.tier.host: entry}}))
        (place / "netrc").write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}\n")
        (place / "netrc").chmod(0o600)


# What must hold


def _check_lines(lines: list[str]) -> None:
    for line in lines:
        if not line.isprintable() or len(line) > 2000:
            raise Problem(f"a message is not one printable line: {line!r}")
        if any(secret in line for secret in (PASSWORD, IDENTITY, BASIC)):
            raise Problem(f"a message has the login: {line}")


def _check_talk(talk: Conversation, size: int) -> None:
    if broken := talk.tier.broken or talk.other.broken:
        raise Problem(f"the server itself failed: {broken}")
    for asked in talk.elsewhere:
        if any(secret in asked.text for secret in (PASSWORD, IDENTITY, BASIC)):
            raise Problem(f"another host has got the login: {asked.text!r}")
    if talk.unvouched_blobs:
        raise Problem("a blob was asked for, and nobody had vouched for it")
    if talk.most > size + BUFFERS:
        raise Problem(f"the client took {talk.most} bytes, and the blob has {size}")


def _check_downloads(staging: Path, size: int) -> None:
    for path in staging.glob("*.part*"):
        if path.stat().st_size > size:
            raise Problem(f"{path.stat().st_size} bytes were written, and the blob has {size}")


def _check_threads(seconds: float) -> None:
    """Those of requests that were given up end, too. Nobody can end a look-up of a name."""
    deadline = time.monotonic() + seconds
    while alive := list(_threads_of_requests()):
        if time.monotonic() > deadline:
            raise Problem(f"a request goes on after the load: {alive[0]}")
        time.sleep(0.01)


def _threads_of_requests() -> Iterator[str]:
    frames = sys._current_frames()
    for each in threading.enumerate():
        frame = frames.get(each.ident or 0)
        if each is threading.main_thread() or each.name == "server" or frame is None:
            continue
        stack = [each.name for each in traceback.extract_stack(frame)]
        if "getaddrinfo" not in stack:
            yield " > ".join(stack)


# Mistakes to find


def _wait_for_ever() -> None:
    patience.Deadline.left = property(lambda _: 3600.0)


def _let_sockets_live() -> None:
    patience.Deadline.guard = lambda *_: None


def _raise_raw_errors() -> None:
    tier._MALFORMED = ()


def _believe_signatures() -> None:
    signatures.require = lambda *_: "ed25519:any"


def _tell_all_hosts() -> None:
    web._host = lambda _: "the same"


def _tell_all_realms() -> None:
    class AllHosts(set[str]):
        def __contains__(self, host: object) -> bool:
            return True

    web.Client._trusted = property(lambda _: AllHosts(), lambda *_: None)


def _print_anything() -> None:
    tier.visible = str


def _take_any_length() -> None:
    take = fetch.take
    fetch.take = lambda origin, _, *given, **named: take(origin, LARGEST, *given, **named)


# Each with what is said of it.
PLANTS = {
    "requests have no deadline": (_wait_for_ever, "it did not end"),
    "sockets of requests that were given up stay open": (_let_sockets_live, "a request goes on"),
    "malformed answers are raw errors": (_raise_raw_errors, "Traceback"),
    "signatures are not verified": (_believe_signatures, "nobody had vouched for it"),
    "all hosts get the login": (_tell_all_hosts, "another host has got the login"),
    "all servers of tokens get the login": (_tell_all_realms, "another host has got the login"),
    "what a tier says is printed as it is": (_print_anything, "not one printable line"),
    "a blob may be longer than its record says": (_take_any_length, "and the blob has"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="an empty directory to work in")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="begin with this round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=PLANTS, help="a mistake to find")
    parser.add_argument(
        "--longest", type=float, default=30, help="seconds after which a round counts as hung"
    )
    options = parser.parse_args()
    for name in [each for each in os.environ if each.startswith("OPKILN_")]:
        del os.environ[name]
    os.environ["OPKILN_PROGRESS"] = "off"
    os.environ["OPKILN_RUNTIME_DIR"] = str(options.directory / "run")
    began = time.monotonic()
    fuzzer = Fuzzer(options.directory, options.seed, options.longest)
    # Commands have more time than a load, and no other limit.
    patience.COMMAND = fetch.COMMAND = patience.Patience(ALL_REQUESTS, ALL_REQUESTS)
    if options.plant:
        PLANTS[options.plant][0]()
    problem = fuzzer.run(options.first, options.rounds)
    seconds = time.monotonic() - began
    print(problem or f"{options.rounds} conversations, 0 problems")
    told = ", ".join(f"{number} {what}" for what, number in sorted(fuzzer.outcomes.items()))
    print(f"{told}; {seconds:.0f} s")
    return bool(problem)


if __name__ == "__main__":
    sys.exit(main())
