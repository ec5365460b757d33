"""What an author declares in Python, held against the op's schemas.

torch calls the reference and the native library by the schema. The stable ABI carries no types: a
schema that says int where the C++ function takes a Tensor ends the process. The reference's
signature is what can be compared with the schema before anything is called.

The check imports the reference, the fakes and the gradients, which an op that is served natively
never needs. So a hit by receipt does without it, and so do commands that only look. It runs when an
op is built, when it is loaded without a receipt, when the reference is to serve, and in
``opkiln doctor``.
"""

from __future__ import annotations

import inspect
import threading
import types
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from opkiln.errors import SpecError
from opkiln.model import REGISTERED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.model import Op, Registration

_BACKWARD, _SETUP = REGISTERED["autograd"]
_CLOSE = 0.8  # how alike two names are that one of them is a slip of the other

# What a schema calls a type, and the annotations that go with it, by their names.
_ANNOTATIONS = {
    "Tensor": ("Tensor",),
    "int": ("int", "SymInt"),
    "SymInt": ("int", "SymInt"),
    "float": ("float", "SymFloat"),
    "bool": ("bool", "SymBool"),
    "str": ("str",),
    "number": ("int", "float", "bool", "complex", "Number"),
    "ScalarType": ("dtype", "int"),
    "Device": ("device", "str"),
}
_KNOWN = {name for names in _ANNOTATIONS.values() for name in names}

# Many ops are built in threads, each of which may be the first to import torch. Python has a thread
# wait for a module that another is importing, but not for the package above it: one that imports
# torch.nn would run it beside a torch that is half there.
_one_at_a_time = threading.RLock()


def check(op: Op) -> None:
    """Raises SpecError for a function that is missing or misspelled in what the op declares, and
    for a reference whose signature contradicts its schema.

    What cannot be imported because another package is not installed here is not looked at.
    """
    if op.registration is not None:
        check_registration(op.spec.name, op.spec.distribution, op.registration)


def check_registration(op: str, distribution: str, registration: Registration) -> None:
    """As ``check``."""
    with _one_at_a_time:
        _check_registration(op, distribution, registration)


def _check_registration(op: str, distribution: str, registration: Registration) -> None:
    for part, check_part in (
        ("reference", _check_reference), ("fake", _check_fake), ("autograd", _check_gradients)
    ):  # fmt: skip
        provide = getattr(registration, part)
        found = provide and _provided(op, distribution, part, provide)
        if found is not None:
            check_part(op, registration, found)


def functions(registration: Registration) -> dict[str, list[tuple[str, Any]]]:
    """Every function in Python that may be called for an op, with its name, by the part of the
    registration that gives it. A part that fails gives the class of its exception instead."""
    listed: dict[str, list[tuple[str, Any]]] = {}
    with _one_at_a_time:
        for part, endings in REGISTERED.items():
            provide = getattr(registration, part)
            try:
                given = provide and provide()
            except Exception as error:  # whoever needs the part is told
                listed[part] = [(f"{part}()", type(error))]
                continue
            names = [name + ending for name in registration.names for ending in endings]
            found = [(name, getattr(given, name, None)) for name in names]
            if found := [each for each in found if each[1] is not None]:
                listed[part] = found
    return listed


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


def missing(op: str, what: str, name: str, found: Any) -> SpecError:
    """The error for a function that an object lacks: where it was looked for, and what it has."""
    has = _functions(found)
    close = get_close_matches(name, has, n=1, cutoff=0.6)
    place = _place(found)
    why = f"looked for in {place}\n"
    why += f"it has: {', '.join(has)}" if has else "it has no functions"
    if close:
        return SpecError(
            f"op {op}: the {what} has no function {name!r}; did you mean {close[0]!r}?",
            why=why,
            hint=f"rename {close[0]} to {name} in {place}",
        )
    return SpecError(
        f"op {op}: the {what} has no function {name!r}", why=why, hint=f"define {name} in {place}"
    )


def _provided(op: str, distribution: str, what: str, provide: Callable[[], Any]) -> Any:
    try:
        return provide()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != distribution:
            return None  # torch, or what the author's package needs, is not in this environment
        raise _failed(op, what, error) from error
    except Exception as error:
        raise _failed(op, what, error) from error


def _failed(op: str, what: str, error: Exception) -> SpecError:
    return SpecError(f"op {op}: its {what}() fails", why=f"{type(error).__name__}: {error}")


def _check_reference(op: str, registration: Registration, found: Any) -> None:
    for name, schema in zip(registration.names, registration.schemas, strict=True):
        function = getattr(found, name, None)
        if function is None:
            raise missing(op, "reference", name, found)
        if wrong := _contradictions(op, registration.namespace, schema, function):
            raise SpecError(
                f"op {op}: the schema and the reference of {name} contradict each other",
                why="\n".join(
                    [f"schema: {schema}", f"reference: {name}{_signature_text(function)}", *wrong]
                ),
                hint=f"change SCHEMAS, or {name} in {_place(found)}; the C++ function has to agree",
            )


def _check_fake(op: str, registration: Registration, found: Any) -> None:
    has, names = _functions(found), registration.names
    for name, schema in zip(names, registration.schemas, strict=True):
        if getattr(found, name, None) is not None:
            continue
        strangers = [each for each in has if each not in names]
        slip = get_close_matches(name, strangers, n=1, cutoff=_CLOSE)
        returns = schema.rpartition("->")[2].strip() != "()"
        # What the fakes lack has its shapes from the reference.
        if slip or (returns and registration.reference is None):
            raise missing(op, "fake", name, found)


def _check_gradients(op: str, registration: Registration, found: Any) -> None:
    names = registration.names
    formulas = [each for each in _functions(found) if each.endswith((_BACKWARD, _SETUP))]
    for formula in formulas:
        ending = _BACKWARD if formula.endswith(_BACKWARD) else _SETUP
        name = formula.removesuffix(ending)
        if name not in names:
            close = get_close_matches(name, names, n=1, cutoff=0.6)
            meant = f"; did you mean {close[0] + ending!r}?" if close else ""
            raise SpecError(
                f"op {op}: {formula!r} in its autograd is the gradient of no function{meant}",
                why=f"found in {_place(found)}\nthe op's functions are: {', '.join(names)}",
                hint=f"rename {formula} to {(close or names)[0]}{ending} in {_place(found)}",
            )
        if ending == _SETUP and name + _BACKWARD not in formulas:
            raise missing(op, "autograd", name + _BACKWARD, found)
    if not formulas:
        raise missing(op, "autograd", names[0] + _BACKWARD, found)


def _functions(found: Any) -> list[str]:
    """The public functions of a module, a class or an object that are its own."""
    module = found.__name__ if isinstance(found, types.ModuleType) else None
    return [
        name
        for name in dir(found)
        if not name.startswith("_")
        and inspect.isroutine(value := getattr(found, name, None))
        and (module is None or getattr(value, "__module__", None) == module)
    ]


def _place(found: Any) -> str:
    kind = found if isinstance(found, types.ModuleType | type) else type(found)
    name = getattr(kind, "__qualname__", kind.__name__)
    if isinstance(kind, types.ModuleType):
        return str(getattr(kind, "__file__", None) or name)
    return f"{kind.__module__}.{name}"


def _signature_text(function: Callable[..., Any]) -> str:
    text = str(inspect.signature(function))
    return text.replace("torch._tensor.", "").replace("torch.Tensor", "Tensor").replace("'", "")


def _contradictions(op: str, namespace: str, text: str, function: Callable[..., Any]) -> list[str]:
    """What of a signature cannot be called as the schema says, or would be something else."""
    import torch

    require_returns_at_once(op, function)
    try:
        schema = torch._C.parse_schema(f"{namespace}::{text}")
    except (RuntimeError, IndexError) as error:  # IndexError: a number that is too large
        raise SpecError(f"op {op}: the schema {text!r} is malformed", why=str(error)) from error
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []  # a builtin, which does not say what it takes
    hints = _hints(function)
    wrong = _arguments(schema, list(signature.parameters.values()), hints)
    if "return" in hints:
        wrong += _returns(list(schema.returns), hints["return"])
    return wrong


def _arguments(
    schema: Any, parameters: list[inspect.Parameter], hints: dict[str, Any]
) -> list[str]:
    by_name = {each.name.lstrip("_"): each for each in parameters}
    positional = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
    takes_more = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    takes_names = any(each.kind == each.VAR_KEYWORD for each in parameters)
    wrong, used = [], set()
    for index, argument in enumerate(schema.arguments):
        if argument.kwarg_only:
            parameter = by_name.get(argument.name)
            if parameter is None or parameter.kind == parameter.POSITIONAL_ONLY:
                if not takes_names:
                    wrong.append(f"the reference takes no keyword {argument.name}")
                continue
        elif index < len(positional):
            parameter = positional[index]
            if parameter.name.lstrip("_") != argument.name:
                wrong.append(
                    f"argument {index + 1} is {argument.name} in the schema, "
                    f"{parameter.name} in the reference"
                )
                used.add(parameter.name)
                continue
        else:
            named = by_name.get(argument.name)
            if named is not None and named.kind == named.KEYWORD_ONLY:
                wrong.append(
                    f"{argument.name} is keyword-only in the reference, and not in the schema"
                )
                used.add(named.name)
            elif not takes_more:
                wrong.append(f"the reference does not take argument {index + 1}, {argument.name}")
            continue
        used.add(parameter.name)
        wrong += _default(argument, parameter)
        if parameter.name in hints and not _goes_with(argument.real_type, hints[parameter.name]):
            wrong.append(
                f"{argument.name} is {argument.real_type} in the schema, "
                f"{_shown(hints[parameter.name])} in the reference"
            )
    return wrong + [
        f"the reference needs {each.name}, which the schema does not have"
        for each in parameters
        if each.name not in used
        and each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def _default(argument: Any, parameter: inspect.Parameter) -> list[str]:
    # torch leaves an argument out of the call where it equals the schema's default.
    if not argument.has_default_value():
        return []
    default = argument.default_value
    if parameter.default is parameter.empty:
        has = f"{argument.name} is {default!r} by default in the schema"
        return [f"{has}, and has no default in the reference"]
    given = parameter.default
    same = list(given) == default if isinstance(given, tuple) else given == default
    if same or not isinstance(given, bool | int | float | str | tuple | list | None):
        return []
    return [f"{argument.name} is {default!r} by default in the schema, {given!r} in the reference"]


def _returns(returns: list[Any], hint: Any) -> list[str]:
    if hint in (Any, typing.NoReturn, typing.Never) or isinstance(hint, str):
        return []
    if len(returns) < 2:
        if not returns:
            fits = hint in (None, type(None))
            return [] if fits else [f"the schema returns nothing, the reference {_shown(hint)}"]
        if hint is type(None) or not _goes_with(returns[0].real_type, hint):
            return [f"the schema returns {returns[0].real_type}, the reference {_shown(hint)}"]
        return []
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if not isinstance(origin, type) or not issubclass(origin, tuple):
        named = isinstance(origin, type) and _kinds(hint)[1]
        several = f"the schema returns {len(returns)} values, the reference {_shown(hint)}"
        return [several] if named or hint is type(None) else []
    count = len(parts) if parts else len(getattr(origin, "_fields", returns))
    if Ellipsis in parts or count == len(returns):
        return []
    return [f"the schema returns {len(returns)} values, the reference {count}"]


def _goes_with(declared: Any, hint: Any) -> bool:
    """Whether an annotation may stand for a schema's type; one that says nothing may."""
    text = str(declared).replace("Optional[", "").replace("?", "").rstrip("]")
    is_list = text.startswith("List[")
    wanted = _ANNOTATIONS.get(text.removeprefix("List["))
    hint_is_list, names = _kinds(hint)
    if wanted is None or names is None:
        return True
    return hint_is_list == is_list and bool(names & set(wanted))


def _kinds(hint: Any) -> tuple[bool, set[str] | None]:
    """Whether an annotation is of a list, and the known names in it; None: it says nothing."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [_kinds(part) for part in parts if part is not type(None)]
        if not rest or any(names is None for _, names in rest):
            return False, None
        return rest[0][0], {name for _, names in rest for name in names or ()}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        inner = _kinds(parts[0])[1] if parts else None
        return True, inner
    if not isinstance(hint, type):
        return False, None
    names = {each.__name__ for each in hint.__mro__ if each.__name__ in _KNOWN}
    if issubclass(hint, bool):
        names = {"bool"}
    return False, names or None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that can be read."""
    import torch

    usual = {"torch": torch, "Tensor": torch.Tensor}  # often imported for type checkers alone
    found: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(inspect.unwrap(function)).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        scope = {**usual, **getattr(function, "__globals__", {})}
        try:
            found |= typing.get_type_hints(alone, globalns=scope)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue  # another name that exists for type checkers alone, or no type at all
    return found


def _shown(hint: Any) -> str:
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
