"""The schema of an op from the annotations of its function.

    def f(x: Tensor, scale: float = 1.0, *, axis: int = -1) -> Tensor
    f(Tensor x, float scale=1.0, *, SymInt axis=-1) -> Tensor

``torch.library.infer_schema`` does the same for fewer types and with other messages.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import types
import typing
from typing import Any

from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What a schema calls Python's types. `SymInt` is an int that torch.compile may keep symbolic.
_PLAIN = {int: "SymInt", float: "float", bool: "bool", str: "str"}
_LISTS = (list, collections.abc.Sequence)
_WORDS = (
    "torch.Tensor, int, float, bool, str, torch.dtype, torch.device, lists of these, and these or "
    "None"
)


def of_function(name: str, function: Callable[..., Any], mutates: Iterable[str] = ()) -> str:
    """The schema of ``function`` as an op ``name`` that writes to the arguments ``mutates``.

    Raises SpecError.
    """
    written = _Written(name, mutates)
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
        word = _argument(name, parameter.name, hints[parameter.name], written)
        if parameter.default is not parameter.empty:
            word += "=" + _default(name, parameter)
        words.append(word)
    written.require_all_found()
    if "return" not in hints:
        raise SpecError(
            f"op {name}: it says nothing of its result",
            hint=f"def {name}(...) -> torch.Tensor    # -> None for one that only writes in place",
        )
    return f"{name}({', '.join(words)}) -> {_results(name, hints['return'])}"


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise SpecError(
            f"op {name}: its annotations cannot be evaluated",
            why=f"{type(error).__name__}: {error}",
            hint="import what they name at the top of the module, not under TYPE_CHECKING",
        ) from error


class _Written:
    """The arguments that an op writes to. Each gets a letter of its own in the schema."""

    def __init__(self, op: str, names: Iterable[str]) -> None:
        if isinstance(names, str):
            names = (names,)
        self._op, self._names = op, tuple(names)
        self._left = set(self._names)

    def mark(self, argument: str) -> str:
        if argument not in self._names:
            return ""
        self._left.discard(argument)
        return f"({chr(ord('a') + self._names.index(argument))}!)"

    def require_all_found(self) -> None:
        if self._left:
            raise SpecError(
                f"op {self._op}: mutates= names {', '.join(sorted(self._left))}",
                why="mutates= lists the tensors, by argument, that the op writes to",
            )


def _argument(op: str, argument: str, hint: Any, written: _Written) -> str:
    base, optional = _optional(hint)
    element = _element(base)
    word = _word(base if element is None else element)
    if word is None:
        raise _refused(op, f"argument {argument}", hint)
    if word == "Tensor":
        word += written.mark(argument)
    if element is not None:
        word += "[]"
    return f"{word}{'?' if optional else ''} {argument}"


def _results(op: str, hint: Any) -> str:
    if hint is type(None):
        return "()"
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if Ellipsis not in parts:
            return f"({', '.join(_result(op, part) for part in parts)})"
    return _result(op, hint)


def _result(op: str, hint: Any) -> str:
    element = _element(hint)
    word = _word(hint if element is None else element)
    if word is None or _optional(hint)[1]:
        raise _refused(op, "the result", hint)
    return word + ("" if element is None else "[]")


def _refused(op: str, what: str, hint: Any) -> SpecError:
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    return SpecError(
        f"op {op}: {what} is annotated with {shown}", why=f"an op takes and returns {_WORDS}"
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
    import torch

    hint, optional = _optional(hint)
    if hint is torch.Tensor or (isinstance(hint, type) and issubclass(hint, torch.Tensor)):
        word: str | None = "Tensor"
    elif hint is torch.dtype:
        word = "ScalarType"
    elif hint is torch.device:
        word = "Device"
    else:
        word = _PLAIN.get(hint)
    return f"{word}?" if word and optional else word


def _default(op: str, parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"}:
        return f'"{value}"'
    if isinstance(value, (list, tuple)) and all(type(each) in (int, bool) for each in value):
        return f"[{', '.join(map(str, value))}]"
    raise SpecError(
        f"op {op}: {parameter.name}={value!r} cannot be the default of an argument",
        why="a schema has None, numbers that are finite, True and False, plain text, and lists of "
        "whole numbers",
        hint=f"{parameter.name}: ... | None = None    # and take None for {value!r}",
    )
