"""Chooses the accelerator of this process, once, on first use.

In this order: the object that ``set_accelerator`` was given, ``OPKILN_ACCELERATOR``, accelerators
of other packages, opkiln's own. An accelerator is chosen because a device answers, not because a
package can be imported. Looking creates no device context, so the process may fork afterwards and
use the device in its child.
"""

from __future__ import annotations

from opkiln.accelerator import gpus
from opkiln.accelerator.cpu import CpuAccelerator
from opkiln.accelerator.device import Answer
from opkiln.base import forks
from opkiln.errors import AcceleratorError
from opkiln.machine.devices import choice
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint
    from typing import Any

    from opkiln.accelerator.interface import Accelerator

# opkiln's own accelerators in the order of preference: the names of ``choice.OWN``.
_KINDS: tuple[type[Accelerator], ...] = (
    gpus.CudaAccelerator, gpus.RocmAccelerator, gpus.XpuAccelerator, *gpus.VENDORS.values(),
    gpus.MpsAccelerator, CpuAccelerator,
)  # fmt: skip
KINDS = {kind.name: kind for kind in _KINDS}

ROOT = "/"  # where the system's files are

# By the value of OPKILN_ACCELERATOR. The objects have no context, so a forked child can use them.
_found: dict[str | None, tuple[Any, tuple[Answer, ...]]] = {}
_lock = forks.lock()


def get_accelerator() -> Accelerator:
    """The accelerator of this process; the same object at every call.

    Creates no device context. Safe from many threads and in forked children. Raises
    AcceleratorError if ``OPKILN_ACCELERATOR`` names one that cannot be used.
    """
    chosen: Accelerator
    if (given := choice.given_accelerator()) is not None:
        chosen = given
        return chosen
    asked: str | None = settings.accelerator
    if asked not in _found:
        with _lock:
            if asked not in _found:
                _found[asked] = _find_by_name(asked) if asked else _find_first()
    chosen = _found[asked][0]
    return chosen


def set_accelerator(accelerator: Accelerator | None) -> None:
    """Make this object the accelerator, regardless of settings and devices.

    It is an ``Accelerator``, or has the methods of one, such as DeepSpeed's. None returns to
    detection. Raises AcceleratorError if it is not an accelerator, or if its device is not here.
    """
    if accelerator is not None:
        _check(accelerator)
    choice.set_given(accelerator)


def trace() -> tuple[Answer, ...]:
    """The answers that led to the current accelerator, in order; its own is the last."""
    accelerator = get_accelerator()
    if choice.given_accelerator() is not None:
        name = choice.requested_name() or ""
        return (Answer(name, True, f"set_accelerator() was given {accelerator!r}"),)
    return _found[settings.accelerator][1]


def survey(root: str | None = None) -> tuple[Answer, ...]:
    """The answer of every accelerator, in the order of preference. A vendor's package, and with it
    torch, is imported only if its device file is there."""
    return tuple(answer for answer, _ in _ask_all(ROOT if root is None else root))


# Looking for a device


def _find_first() -> tuple[Any, tuple[Answer, ...]]:
    answers = []
    for answer, accelerator in _ask_all(ROOT):
        answers.append(answer)
        if answer.present:
            return accelerator, tuple(answers)
    raise AssertionError("the CPU is always there")


def _ask_all(root: str) -> Iterator[tuple[Answer, Any]]:
    """Each accelerator's answer, and the accelerator if it can be used."""
    for entry in choice.accelerators():
        yield _ask_entry(entry, root, asked=False)
    for kind in KINDS.values():
        answer = kind.look(root)
        yield answer, kind() if answer.present else None


def _ask_entry(entry: EntryPoint, root: str, *, asked: bool) -> tuple[Answer, Any]:
    """The answer of another package's accelerator, and the accelerator if it can be used. If its
    code raises an error or exits the interpreter, that is the answer."""
    if entry.name in KINDS:
        return Answer(entry.name, False, f"{entry.value}: the name is opkiln's own"), None
    try:
        kind = entry.load()
        if not hasattr(kind, "look"):  # written for DeepSpeed
            accelerator = kind()
            present = bool(accelerator.is_available())
            why = f"{entry.value}.is_available() is {present}"
            return Answer(entry.name, present, why), accelerator
        answer = kind.look(root, asked=asked)
        told = Answer(entry.name, bool(answer.present), str(answer.why))
        return told, kind() if told.present else None
    except (Exception, SystemExit) as error:
        return Answer(entry.name, False, f"{entry.value}: {type(error).__name__}: {error}"), None


# An accelerator that is requested by name, or given


def _find_by_name(name: str) -> tuple[Any, tuple[Answer, ...]]:
    if name in KINDS:
        kind = KINDS[name]
        answer = kind.look(ROOT, asked=True)
        if name == "cuda" and not answer.present:
            # A ROCm torch calls its devices cuda, and so do its users.
            told = gpus.RocmAccelerator.look(ROOT, asked=True)
            kind, answer = (gpus.RocmAccelerator, told) if told.present else (kind, answer)
        accelerator = kind() if answer.present else None
    else:
        entries = [entry for entry in choice.accelerators() if entry.name.lower() == name]
        if not entries:
            raise _unusable(name, choice.UNKNOWN)
        answer, accelerator = _ask_entry(entries[0], ROOT, asked=True)
    if not answer.present:
        raise _unusable(name, answer.why)
    return accelerator, (answer,)


def _unusable(name: str, reason: str) -> AcceleratorError:
    others = [answer for answer in survey() if answer.name != name]
    usable = [answer.name for answer in others if answer.present]
    return choice.unusable(name, reason, _describe(others), usable[0])


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
            why=_describe([answer for answer in answers if answer.name != name]),
        )


def _describe(answers: list[Answer]) -> str:
    """A line for each accelerator; those that can be used come first."""
    able = [f"{answer.name} can: {answer.why}" for answer in answers if answer.present]
    unable = [f"{answer.name} cannot: {answer.why}" for answer in answers if not answer.present]
    return "\n".join([*able, *unable])
