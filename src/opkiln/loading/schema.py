"""The schema of an op from the annotations of its function.

    def f(x: Tensor, scale: float = 1.0, *, axis: int = -1) -> Tensor
    f(Tensor x, float scale=1.0, *, SymInt axis=-1) -> Tensor

``torch.library.infer_schema`` does the same for fewer types and with other messages.
"""

from __future__ import annotations

import collections.abc
import inspect
import sys
import types
import typing
from typing import Any

from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What a schema calls Python's types. `SymInt` is an int that torch.compile may keep symbolic.
_PLAIN = {int: "SymInt", float: "float", bool: "bool", str: "str"}
_OF_TORCH = {"torch.Tensor": "Tensor", "torch.dtype": "ScalarType", "torch.device": "Device"}
_LISTS = (list, collections.abc.Sequence)
_WORDS = (
    "torch.Tensor, int, float, bool, str, torch.dtype, torch.device, lists of these, and these or "
    "None"
)
_LARGEST, _SMALLEST = sys.float_info.max, sys.float_info.min  # larger than 0
_DEFAULTS = (
    "whole numbers of 64 bits, finite numbers, True and False, plain text, devices, and lists of "
    "numbers, as the annotation says"
)


def schema_of(name: str, function: Callable[..., Any], mutates: Iterable[str] = ()) -> str:
    """The schema of ``function`` as an op ``name`` that writes to the arguments ``mutates``.

    Raises SpecError.
    """
    require_returns_at_once(name, function)
    # Each argument that is written to has a letter of its own.
    marks = {
        each: f"({chr(ord('a') + place)}!)" for place, each in enumerate(dict.fromkeys(mutates))
    }
    signature = inspect.signature(function)
    hints = _hints(name, function)
    words = []
    named = False  # behind `*`
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SpecError(
                f"op {name}: it takes *{parameter.name}",
                why="a schema has a fixed list of arguments",
                hint=f"{parameter.name}: list[torch.Tensor]",
            )
        if parameter.kind == parameter.KEYWORD_ONLY and not named:
            named = True
            words.append("*")
        if parameter.name not in hints:
            raise SpecError(
                f"op {name}: argument {parameter.name} has no annotation",
                why="the schema is made of the annotations",
                hint=f"def {name}({parameter.name}: torch.Tensor, ...) -> torch.Tensor",
            )
        word = _argument(name, parameter.name, hints[parameter.name], marks)
        if parameter.default is not parameter.empty:
            word += "=" + _default(name, parameter, word.partition(" ")[0], hints[parameter.name])
        words.append(word)
    if marks:
        raise SpecError(
            f"op {name}: mutates= names {', '.join(sorted(marks))}",
            why="mutates= lists the tensors, by argument, that the op writes to",
        )
    if "return" not in hints:
        raise SpecError(
            f"op {name}: it says nothing of its result",
            hint=f"def {name}(...) -> torch.Tensor    # -> None for one that only writes in place",
        )
    results = results_of(hints["return"])
    if results is None:
        raise _refusal(name, "the result", hints["return"])
    return f"{name}({', '.join(words)}) -> {results}"


def require_returns_at_once(op: str, function: Callable[..., Any]) -> None:
    """Raise SpecError for an ``async def`` and a generator: they return before they compute."""
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        name = getattr(function, "__name__", "")
        raise SpecError(
            f"op {op}: {name} is {'an async function' if is_async else 'a generator'}",
            why="torch calls it and takes what it returns; it neither awaits nor iterates",
            hint=f"def {name}(...): return ...    # without async and yield",
        )


_compiled: dict[str, types.CodeType] = {}  # annotations, by their text: a module repeats them


def _evaluate(text: str, scope: dict[str, Any]) -> Any:
    if text in scope:
        return scope[text]
    if (code := _compiled.get(text)) is None:
        code = _compiled[text] = compile(text, "<annotation>", "eval")
    return eval(code, scope)  # noqa: S307 (as Python would, without the import that postpones it)


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations, evaluated: as ``typing.get_type_hints``, in a fraction of its time."""
    given = function.__annotations__
    try:
        scope = function.__globals__
        hints = {
            each: _evaluate(hint, scope) if isinstance(hint, str) else hint
            for each, hint in given.items()
        }
        if any(isinstance(part, str) for each in hints.values() for part in typing.get_args(each)):
            hints = typing.get_type_hints(function)  # a text in a type: list["Tensor"]
        return {each: type(None) if hint is None else hint for each, hint in hints.items()}
    except Exception as error:
        raise SpecError(
            f"op {name}: its annotations cannot be evaluated",
            why=f"{type(error).__name__}: {error}",
            hint="import what they name at the top of the module, not under TYPE_CHECKING",
        ) from error


def _argument(op: str, argument: str, hint: Any, marks: dict[str, str]) -> str:
    """An argument of the schema. Takes the mark of one that is written to out of ``marks``."""
    kind = type_of(hint)
    if kind is None:
        raise _refusal(op, f"argument {argument}", hint)
    if kind.startswith("Tensor") and not kind.startswith("Tensor?["):
        kind = f"Tensor{marks.pop(argument, '')}{kind.removeprefix('Tensor')}"
    return f"{kind} {argument}"


def type_of(hint: Any) -> str | None:
    """What a schema calls an annotation of an argument; None if it has no word for it."""
    if isinstance(hint, type):
        return _word(hint)
    base, optional = _optional(hint)
    element = _element(base)
    word = _word(base if element is None else element)
    if word is None:
        return None
    return f"{word}{'' if element is None else '[]'}{'?' if optional else ''}"


def results_of(hint: Any) -> str | None:
    """What a schema calls the annotation of a result; None if it has no word for it."""
    if hint is type(None):
        return "()"
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple or Ellipsis in parts:
        return _result(hint)
    kinds = [_result(part) for part in parts]
    return None if None in kinds else f"({', '.join(map(str, kinds))})"


def _result(hint: Any) -> str | None:
    kind = type_of(hint)
    return None if kind == "Tensor?" else kind  # graphs take no result that may be None for one


def _refusal(op: str, what: str, hint: Any) -> SpecError:
    return SpecError(
        f"op {op}: {what} is annotated with {inspect.formatannotation(hint)}",
        why=f"an op takes and returns {_WORDS}",
    )


def _optional(hint: Any) -> tuple[Any, bool]:
    """(the type itself, whether None is one of its values)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(parts) == 1 and len(typing.get_args(hint)) == 2:
            return parts[0], True
    return hint, False


def _element(hint: Any) -> Any:
    """The type of a list's elements; None for another type. ``tuple[int, ...]`` is a list, too."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in _LISTS and len(parts) == 1:
        return parts[0]
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return parts[0]
    return None


def _word(hint: Any) -> str | None:
    hint, optional = (hint, False) if isinstance(hint, type) else _optional(hint)
    # Not by a look-up: an annotation may be a list, which has no hash.
    word = next((word for kind, word in _PLAIN.items() if kind is hint), None)
    # By name: commands read annotations without importing torch.
    for kind in hint.__mro__ if isinstance(hint, type) else ():
        word = word or _OF_TORCH.get(f"{kind.__module__}.{kind.__qualname__}")
    return f"{word}?" if word and optional else word


def _default(op: str, parameter: inspect.Parameter, word: str, hint: Any) -> str:
    """The default as a schema has it; ``word`` is the argument's type there."""
    if (written := _constant(word, parameter.default)) is not None:
        return written
    name, wanted, shown = (
        parameter.name,
        inspect.formatannotation(hint),
        _show_value(parameter.default),
    )
    given = "None" if parameter.default is None else f"None    # and take None for {shown}"
    raise SpecError(
        f"op {op}: {name}={shown} cannot be the default of an argument annotated with {wanted}",
        why=f"a schema has {_DEFAULTS}; None for what is annotated so",
        hint=f"{name}: {wanted.removesuffix(' | None')} | None = {given}",
    )


def _constant(word: str, value: Any) -> str | None:
    """A value as the constant of a schema; None if an argument of this type cannot have it."""
    kind = word.removesuffix("?")
    if value is None:
        return "None" if word != kind else None
    if word in ("SymInt[]", "float[]", "bool[]") and isinstance(value, (list, tuple)):
        parts = [_constant(word[:-2], each) for each in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if isinstance(value, bool):
        return str(value) if kind == "bool" else None
    if kind == "SymInt" and isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return str(int(value))  # an enum's member is an int, too
    if kind == "float" and isinstance(value, (int, float)) and abs(value) <= _LARGEST:
        number = float(value)
        # torch refuses to read numbers that are closer to zero.
        return repr(number) if number == 0 or abs(number) >= _SMALLEST else None
    if kind == "str" and isinstance(value, str):
        return f'"{value}"' if value.isprintable() and not set(value) & {'"', "\\"} else None
    return f'"{value}"' if kind == "Device" and _word(type(value)) == kind else None


def _show_value(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # also a number of more digits than Python prints
        return f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:60]}…"
