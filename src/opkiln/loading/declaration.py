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
import types
import typing
from difflib import get_close_matches
from typing import Any

from opkiln.base import forks, signature
from opkiln.base.model import REGISTERED
from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.base.model import Op, Registration

_CLOSE = 0.8  # how alike two names are that one of them is a slip of the other

# Annotations that a type of a schema may have besides its own.
_ALSO = {"Scalar": ("int", "float", "bool"), "ScalarType": ("int",), "Device": ("str",)}

# Many ops are built in threads, each of which may be the first to import torch. Python has a thread
# wait for a module that another is importing, but not for the package above it: one that imports
# torch.nn would run it beside a torch that is half there.
_one_at_a_time = forks.lock()


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
        for part in ("reference", "fake", "backward"):
            provide = getattr(registration, part)
            found = provide and _call_provider(op, distribution, part, provide)
            if found is not None:
                _check_names(op, registration, part, found)
                if part == "reference":
                    _check_reference(op, registration, found)


def functions(registration: Registration) -> dict[str, list[tuple[str, Any]]]:
    """Every function in Python that may be called for an op, with its name, by the part of the
    registration that gives it. A part that fails gives the class of its exception instead."""
    listed: dict[str, list[tuple[str, Any]]] = {}
    with _one_at_a_time:
        for part in REGISTERED:
            provide = getattr(registration, part)
            try:
                given = provide and provide()
            except Exception as error:  # whoever needs the part is told
                listed[part] = [(f"{part}()", type(error))]
                continue
            found = [(name, getattr(given, name, None)) for name in registration.names]
            if found := [each for each in found if each[1] is not None]:
                listed[part] = found
    return listed


def missing(op: str, what: str, name: str, found: Any) -> SpecError:
    """The error for a function that an object lacks: where it was looked for, and what it has."""
    has = _functions(found)
    close = get_close_matches(name, has, n=1, cutoff=0.6)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    place, listed = _place(found), f"it has: {', '.join(has)}" if has else "it has no functions"
    return SpecError(
        f"op {op}: the {what} has no function {name!r}{meant}",
        why=f"looked for in {place}\n{listed}",
        hint=f"{f'rename {close[0]} to' if close else 'define'} {name} in {place}",
    )


def _call_provider(op: str, distribution: str, what: str, provide: Callable[[], Any]) -> Any:
    try:
        return provide()
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and (getattr(error, "name", None) or "").partition(".")[0] != distribution:
            return None  # torch, or what the author's package needs, is not installed here
        why = f"{type(error).__name__}: {error}"
        raise SpecError(f"op {op}: its {what}() fails", why=why) from error


def _check_names(op: str, registration: Registration, part: str, found: Any) -> None:
    """Raises SpecError for a function that a part lacks. A part other than the reference may lack
    some, but not where it has one whose name looks like a slip of the pen."""
    has, names = _functions(found), registration.names
    strangers = [each for each in has if each not in names]
    lacking = [each for each in names if getattr(found, each, None) is None]
    for name, schema in zip(names, registration.schemas, strict=True):
        returns = schema.rpartition("->")[2].strip() != "()"
        needed = {
            "reference": True,
            "fake": returns and registration.reference is None,
            "backward": len(lacking) == len(names),
        }
        slip = get_close_matches(name, strangers, n=1, cutoff=_CLOSE)
        if name in lacking and (slip or needed[part]):
            raise missing(op, part, name, found)


def _check_reference(op: str, registration: Registration, found: Any) -> None:
    for name, schema in zip(registration.names, registration.schemas, strict=True):
        function = getattr(found, name)
        if wrong := _contradictions(op, registration.namespace, schema, function):
            raise SpecError(
                f"op {op}: the schema and the reference of {name} contradict each other",
                why="\n".join(
                    [f"schema: {schema}", f"reference: {name}{_signature_text(function)}", *wrong]
                ),
                hint=f"change SCHEMAS, or {name} in {_place(found)}; the C++ function has to agree",
            )


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
    """How the schema of the reference's annotations differs from the one that is declared."""
    import torch

    from opkiln.loading import schema as schemas

    schemas.require_returns_at_once(op, function)
    try:
        declared = torch._C.parse_schema(f"{namespace}::{text}").arguments
    except (RuntimeError, IndexError) as error:  # IndexError: a number that is too large
        raise SpecError(f"op {op}: the schema {text!r} is malformed", why=str(error)) from error
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):
        return []  # a builtin, which does not say what it takes
    plain = [each.name for each in declared if not each.kwarg_only]
    by_name = {each.name: each.name for each in declared if each.kwarg_only}
    try:
        given = parameters.bind(*plain, **by_name).arguments
    except TypeError as error:
        return [f"called with the arguments of the schema, the reference raises: {error}"]
    hints = _hints(function)
    kinds = {name: kind for kind, name in signature.arguments(text)}
    names = {name: each for each, name in given.items() if isinstance(name, str)}  # not of *args
    wrong = []
    for place, argument in enumerate(declared, start=1):
        if argument.name not in names:
            continue
        parameter = parameters.parameters[names[argument.name]]
        if parameter.name.lstrip("_") != argument.name:
            named = f"{argument.name} in the schema, {parameter.name} in the reference"
            wrong.append(f"argument {place} is {named}")
            continue
        wrong += _default(argument, parameter)
        if (annotated := schemas.type_of(hints.get(parameter.name))) is not None:
            both = (signature.canonical(each) for each in (kinds[argument.name], annotated))
            wrong += _difference(argument.name, *both)
    if (annotated := schemas.results_of(hints.get("return"))) is not None:
        both = (signature.results_of(each) for each in (text, f"() -> {annotated}"))
        wrong += _difference("the result", *both)
    return wrong


def _difference(what: str, declared: str, annotated: str) -> list[str]:
    """What a type is in the schema and in the reference, if the annotation says another. It need
    not say whether an argument is written to, or may be None."""
    wanted, found = (each.replace("(!)", "").replace("?", "") for each in (declared, annotated))
    if found == wanted or found in _ALSO.get(wanted, ()):
        return []
    return [f"{what} is {wanted} in the schema, {found} in the reference"]


def _default(argument: Any, parameter: inspect.Parameter) -> list[str]:
    # torch leaves an argument out of the call where it equals the schema's default.
    if not argument.has_default_value():
        return []
    default, given = argument.default_value, parameter.default
    has = f"{argument.name} is {default!r} by default in the schema"
    if given is parameter.empty:
        return [f"{has}, and has no default in the reference"]
    same = list(given) == default if isinstance(given, tuple) else given == default
    if same or not isinstance(given, bool | int | float | str | tuple | list | None):
        return []
    return [f"{has}, {given!r} in the reference"]


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
