"""Shared by all probes of compilers: a directory to compile in, and a memory of the answers.

An answer is kept as a JSON file, with the facts that it depends on, and is used while they hold. A
lost record costs one probe; a damaged one is ignored.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from opkiln.base.digest import Signature, key, read_file
from opkiln.base.trust import claim
from opkiln.machine import facts
from opkiln.machine.facts import FILE, LISTING, Hasher, signature_of
from opkiln.machine.toolchain import find
from opkiln.settings import compiler_variables, settings

T = TypeVar("T")
Ask = Callable[..., tuple[int, str]]

SCHEMA = 9


def make_subject(question: str, *, script: bool = False) -> str:
    """The subject of a question to a compiler, with the variables that may change the answer."""
    variables = compiler_variables(script=script)
    return f"{question} with {key('variables', variables)}" if variables else question


def recall_or_ask(
    directories: tuple[str, ...],
    subject: str,
    question: Callable[[], tuple[dict[str, Any], list[str]]] | None,
) -> dict[str, Any] | None:
    """The record on a subject, remembered or from a question. None without either. ``question``
    returns the record, and the files that it depends on. If it raises, nothing is remembered."""
    record = recall(directories, subject)
    if record is None and question is not None:
        asked_at = time.time_ns()
        record, files = question()
        remember(directories, subject, record, files, asked_at)
    return record


def recall(directories: tuple[str, ...], subject: str) -> dict[str, Any] | None:
    """The first record on this subject whose facts still hold."""
    for directory in directories:
        try:
            record: dict[str, Any] = json.loads(read_file(_path(directory, subject)))
            if record["schema"] == SCHEMA and record["subject"] == subject and _holds(record):
                return record
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def _holds(record: dict[str, Any]) -> bool:
    """Raises OSError, and others if the record is damaged."""
    hasher = Hasher()
    signed: dict[str, Signature] = {}
    for kind, path, then, *fields in record["facts"]:
        signature: Signature = Signature(*fields)
        if not signature.holds(path):
            now, signature = facts.ask_again(kind, path, then, hasher)
            if now != then:
                return False
        facts.note_file(path, signature)
        signed[path] = signature
    if any(map(facts.exists, record.get("absent", ()))):
        return False
    # The files are unchanged, but names may lead elsewhere now: a symbolic link was changed, or
    # another `as` comes first on PATH.
    for name, target in record.get("resolved", ()):
        program = name if "/" in name else find.find_program(name)
        if program is None or os.path.realpath(program) != target:
            return False
        facts.note_file(program, signed.get(target))  # a changed link leads to another inode
    if until := record.get("until"):
        facts.note_incomplete()
        return bool(time.time() < until)
    return True


def remember(
    directories: tuple[str, ...],
    subject: str,
    answer: dict[str, Any],
    files: list[str],
    asked_at: int | None = None,
) -> None:
    """Keep an answer on a subject, bound to these files, in the first of the directories.

    It is also bound to these fields of its own: ``resolved``, pairs of a name and the program that
    it leads to; ``absent``, paths that do not exist; ``until``, the time when it expires.

    Nothing is kept if there is no directory, if it cannot be written, or if one of the files no
    longer exists.

    ``asked_at`` is the time before the first question (default: now). A file that changed since
    then may not be the one that answered, so its signature is not trusted.
    """
    if not directories:
        return
    try:
        rows = [_row(path, asked_at) for path in files]
    except OSError:
        return
    record = {**answer, "schema": SCHEMA, "subject": subject, "facts": rows}
    from opkiln.base.digest import write_private  # not for a hit, which only recalls

    try:
        if claim(os.path.dirname(directories[0])):
            return  # it belongs to another user; a build reports that
        write_private(_path(directories[0], subject), json.dumps(record).encode())
    except OSError:
        pass  # full or read-only: the next process probes again, which is only slower


def _row(path: str, asked_at: int | None) -> list[Any]:
    """The fact of a file, or of a directory's list of names. Raises OSError."""
    kind = LISTING if os.path.isdir(path) else FILE
    signature = signature_of(kind, path)
    # The contents are hashed only if the signature alone may not show a later change.
    suffices = not (signature.in_image or signature.known_by_contents)
    value = "" if suffices else facts.value(kind, path, "", Hasher())
    asked_at = min(asked_at or signature.read_at, signature.read_at)
    return [kind, path, value, *signature._replace(read_at=asked_at)]


def _path(directory: str, subject: str) -> str:
    return os.path.join(directory, key("memo", subject) + ".json")


def note_unobserved(directories: tuple[str, ...], cxx: str, why: str) -> None:
    """Keep in mind why what a compiler does could not be observed; empty if it could."""
    if why != why_unobserved(directories, cxx):
        remember(directories, f"unobserved {cxx}", {"why": why}, [cxx])


def why_unobserved(directories: tuple[str, ...], cxx: str) -> str:
    """Why what this compiler does could not be observed when it was last used; empty if it was."""
    known = recall(directories, f"unobserved {cxx}")
    return "" if known is None else known["why"]


# Asking a compiler, and reading its answers


def make_ask(*program: str, **options: Any) -> Ask:
    """A function that runs a program with arguments: (its exit status, what it printed)."""
    from opkiln.run.process import run

    def ask(*arguments: str) -> tuple[int, str]:
        done = run((*program, *arguments), **options)
        return done.returncode, done.output

    return ask


def refusal(reason: str, version: str = "", **more: Any) -> dict[str, Any]:
    """The record of a compiler that cannot be used."""
    return {"refused": reason, "version": version, **more}


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def field(text: str, label: str) -> str:
    """The text after a label at the start of a line; empty if there is none."""
    lines = (line for line in text.splitlines() if line.startswith(label))
    return next(lines, label)[len(label) :].strip()


def search_path(verbose: str) -> list[str]:
    """The directories that ``-v`` lists between its markers, resolved."""
    _, *listings = verbose.split("#include <...> search starts here:\n")
    lines = [
        line.strip()
        for listing in listings
        for line in listing.partition("End of search list.")[0].splitlines()
    ]
    return list(dict.fromkeys(os.path.realpath(line) for line in lines if line))


def own_programs(ask: Ask, names: Iterable[str]) -> list[list[str]]:
    """[name, program] of the parts that gcc or clang says it starts."""
    asked = [begin_in_thread(partial(ask, f"-print-prog-name={each}")) for each in names]
    found = []
    for wait in asked:
        status, answer = wait()
        name = answer.strip()
        program = find.find_program(name) if status == 0 and name else None
        if program is not None:
            found.append([name, os.path.realpath(program)])
    return found


def existing_directories(paths: Iterable[str]) -> list[str]:
    """Those of these that are directories, resolved, each once."""
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def holds(directory: str, name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))


# Where a probe compiles


def _place() -> str:
    chosen: str | None = settings.tmpdir
    return chosen if chosen and os.path.isdir(chosen) else "/tmp"


def is_unwritable() -> bool:
    """Whether no compiler can be probed, because there is no directory for it."""
    return not os.access(_place(), os.W_OK | os.X_OK)


@contextmanager
def scratch() -> Iterator[str]:
    """A private node-local directory, removed afterwards, also if this process is killed. If
    ``OPKILN_TMPDIR`` does not exist, /tmp is used; a build reports that. Raises OSError."""
    from opkiln.run import process  # here, because a cache hit does not need it

    path = process.make_scratch(_place(), "probe")
    try:
        yield path
    finally:
        process.remove_scratch(path)


def begin_in_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Begin some work in a thread. The returned function waits for its result, or raises."""
    import contextvars
    import threading
    from concurrent.futures import Future

    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # With the settings that the caller overrode. If the interpreter exits, it does not wait.
    threading.Thread(target=contextvars.copy_context().run, args=(do,), daemon=True).start()
    return future.result
