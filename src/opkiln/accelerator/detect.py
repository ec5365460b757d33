"""Which accelerator this process runs on: found once, when it is first asked for.

In this order: what ``set_accelerator`` was given, ``OPKILN_ACCELERATOR``, accelerators of other
packages, opkiln's own. One is taken because a device answers, not because a package imports, and
looking makes no device context: a process may fork afterwards and use the device in its child.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module

from opkiln.accelerator import choice
from opkiln.accelerator.answer import Answer
from opkiln.accelerator.choice import OWN
from opkiln.accelerator.torch_build import why_without
from opkiln.errors import AcceleratorError
from opkiln.settings import origin_of, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint
    from typing import Any

    from opkiln.accelerator.base import Accelerator

GROUP = "opkiln.accelerators"
ROOT = "/"  # where the system's files lie

# By what OPKILN_ACCELERATOR says. Plain objects without a context: as good in a forked child.
_found: dict[str | None, tuple[Any, tuple[Answer, ...]]] = {}
_lock = threading.RLock()


def _after_fork() -> None:
    # The thread that forked may not be the one that is looking; the child must not wait for it.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def get_accelerator() -> Accelerator:
    """The accelerator of this process; the same object at every call.

    Makes no device context. Safe from many threads and in forked children. Raises AcceleratorError
    where ``OPKILN_ACCELERATOR`` names one that cannot serve.
    """
    chosen: Accelerator
    if (given := choice.given()) is not None:
        chosen = given
        return chosen
    asked: str | None = settings.accelerator
    if asked not in _found:
        with _lock:
            if asked not in _found:
                _found[asked] = _named(asked) if asked else _first()
    chosen = _found[asked][0]
    return chosen


def set_accelerator(accelerator: Accelerator | None) -> None:
    """Have this object be the accelerator, whatever the settings and the devices say.

    It is an ``Accelerator`` or has the methods of one, such as DeepSpeed's. None goes back to
    looking. Raises AcceleratorError for what is no accelerator or finds no device of its own.
    """
    if accelerator is not None:
        _check(accelerator)
    choice.give(accelerator)


def trace() -> tuple[Answer, ...]:
    """What was asked for the accelerator in force, in order; the one that was taken comes last."""
    accelerator = get_accelerator()
    if choice.given() is not None:
        name = choice.asked_name() or ""
        return (Answer(name, True, f"set_accelerator() was given {accelerator!r}"),)
    return _found[settings.accelerator][1]


def survey(root: str | None = None) -> tuple[Answer, ...]:
    """Every accelerator that could be, whether a device answers, and why not, in the order of
    preference. A vendor's package, and so torch, is imported only where its device seems to be."""
    return tuple(answer for answer, _ in _ask_all(ROOT if root is None else root))


# Looking


def _first() -> tuple[Any, tuple[Answer, ...]]:
    answers = []
    for answer, accelerator in _ask_all(ROOT):
        answers.append(answer)
        if answer.present:
            return accelerator, tuple(answers)
    raise AssertionError("the CPU is always there")


def _ask_all(root: str) -> Iterator[tuple[Answer, Any]]:
    """Each accelerator's answer, and the accelerator where it can serve."""
    for entry in _entry_points():
        yield _ask_entry(entry, root, asked=False)
    for name in OWN:
        kind = _own(name)
        answer = kind.look(root)
        yield answer, kind() if answer.present else None


def _own(name: str) -> type[Accelerator]:
    module = import_module(f"opkiln.accelerator.{name}")
    kind: type[Accelerator] = getattr(module, OWN[name])
    return kind


def _entry_points() -> list[EntryPoint]:
    if not _declared():
        return []
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


def _declared() -> bool:
    """Whether an installed distribution may have such an accelerator.

    Importing importlib.metadata takes some hundred times as long as this, and hardly anybody has
    one. What is no directory (a zip file) may hold anything.
    """
    mark = GROUP.encode()
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except NotADirectoryError:
            return True
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(place, name, "entry_points.txt"), "rb") as file:
                        if mark in file.read():
                            return True
                except OSError:
                    continue  # it has none, or is a file itself
    return False


def _ask_entry(entry: EntryPoint, root: str, *, asked: bool) -> tuple[Answer, Any]:
    """What another package's accelerator says, and the accelerator where it can serve. Its code may
    fail in any way, or leave the interpreter: that is an answer."""
    if entry.name in OWN:
        return Answer(entry.name, False, f"{entry.value}: the name is opkiln's own"), None
    try:
        kind = entry.load()
        if not hasattr(kind, "look"):  # one that was written for DeepSpeed
            accelerator = kind()
            present = bool(accelerator.is_available())
            why = f"{entry.value}.is_available() is {present}"
            return Answer(entry.name, present, why), accelerator
        answer = kind.look(root, asked=asked)
        told = Answer(entry.name, bool(answer.present), str(answer.why))
        return told, kind() if told.present else None
    except (Exception, SystemExit) as error:
        return Answer(entry.name, False, f"{entry.value}: {type(error).__name__}: {error}"), None


# What was asked for by name


def must_be_known(name: str) -> None:
    """Raise AcceleratorError for a name that no accelerator has, and for ``rocm`` where torch is
    built without it. Asks no device for a name that is good, and imports no package."""
    if name not in OWN:
        _theirs(name)
    elif name == "rocm" and (why := why_without("ROCm")):
        raise _cannot(name, why)


def _theirs(name: str) -> EntryPoint:
    for entry in _entry_points():
        if entry.name.lower() == name:
            return entry
    raise _cannot(name, "there is no accelerator of this name")


def _named(name: str) -> tuple[Any, tuple[Answer, ...]]:
    if name in OWN:
        answer, kind = _ask_own(name)
        accelerator = kind() if answer.present else None
    else:
        answer, accelerator = _ask_entry(_theirs(name), ROOT, asked=True)
    if not answer.present:
        raise _cannot(name, answer.why)
    return accelerator, (answer,)


def _ask_own(name: str) -> tuple[Answer, type[Accelerator]]:
    kind = _own(name)
    answer = kind.look(ROOT, asked=True)
    if name == "cuda" and not answer.present:
        # A ROCm torch calls its devices cuda, and so do the people who name them.
        rocm = _own("rocm")
        told = rocm.look(ROOT, asked=True)
        if told.present:
            return told, rocm
    return answer, kind


def _cannot(name: str, why: str) -> AcceleratorError:
    variable = origin_of("accelerator")[1]
    what = f"{variable}={name}" if variable.isupper() else f"accelerator {name!r}"
    others = [answer for answer in survey() if answer.name != name]
    able = [answer.name for answer in others if answer.present]
    return AcceleratorError(
        f"{what} cannot be used: {why}",
        why=_listed(others),
        hint=f"unset {variable}" if variable.isupper() else f"one that can be used: {able[0]}",
    )


def _check(accelerator: Any) -> None:
    needed = ("is_available", "device_name", "device_count", "create_op_builder")
    missing = [name for name in needed if not callable(getattr(accelerator, name, None))]
    if missing or isinstance(accelerator, type):
        lack = f"it has no {', '.join(missing)}" if missing else "it is a class, not an object"
        raise AcceleratorError(
            f"set_accelerator() takes an accelerator, not {accelerator!r}", why=lack
        )
    if not accelerator.is_available():
        name = str(getattr(accelerator, "name", "") or accelerator.device_name())
        answers = survey()
        reasons = [answer.why for answer in answers if answer.name == name and not answer.present]
        raise AcceleratorError(
            f"accelerator {name!r} cannot be used: {next(iter(reasons), 'no device answers')}",
            why=_listed([answer for answer in answers if answer.name != name]),
        )


def _listed(answers: list[Answer]) -> str:
    able = [f"{answer.name} can: {answer.why}" for answer in answers if answer.present]
    unable = [f"{answer.name} cannot: {answer.why}" for answer in answers if not answer.present]
    return "\n".join([*able, *unable])
