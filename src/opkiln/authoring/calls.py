"""The Python function that a decorated op is called by.

It is written for the op's own signature, as ``dataclasses`` writes ``__init__``: a call costs a
fraction of a microsecond more than torch's own object for the op. If no gradient is needed, it
calls an overload without one: autograd in Python takes longer than a small kernel.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.autograd import forward_ad

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_WITH_GRADIENT = """\
def {name}({parameters}):
    try:
        differentiate = (
            ({requires_grad}) and is_grad_enabled_()
        ) or forward_ad_._current_level >= 0 or is_exporting_()
    except AttributeError:  # not tensors: torch says so
        differentiate = True
    if differentiate:
        return overload_({arguments})
    if is_dynamo_compiling_():
        return no_grad_({arguments})
    return call_({arguments})
"""
_IN_PLACE = """\
def {name}({parameters}):
    if is_grad_enabled_() and requires_grad_({tensors}):
        refuse_()
    return overload_({arguments})
"""


def function_for(
    function: Callable[..., Any], overload: Any, no_grad: Any, written: tuple[str, ...]
) -> Callable[..., Any]:
    """The function to call in the place of ``function``. ``no_grad`` is None for an op that writes
    to its arguments."""
    names: dict[str, Any] = {
        "overload_": overload,
        "no_grad_": no_grad,
        # What calling torch's object does, without its Python method: half a microsecond less.
        # torch.compile knows the object alone.
        "call_": getattr(no_grad, "_op", no_grad),
        "is_dynamo_compiling_": torch.compiler.is_dynamo_compiling,
        "is_grad_enabled_": torch.is_grad_enabled,
        "forward_ad_": forward_ad,
        # An exported program may be trained, with arguments other than those it was traced with.
        "is_exporting_": torch.compiler.is_exporting,
        "any_": _any_requires_grad,
        "requires_grad_": _any_requires_grad,
        "refuse_": functools.partial(_refuse, function.__name__, written),
    }
    parameters, arguments = _signature(function, names)
    kinds = {each.name: str(each.type) for each in overload._schema.arguments}
    tensors = [name for name, kind in kinds.items() if "Tensor" in kind]
    text = (_IN_PLACE if no_grad is None else _WITH_GRADIENT).format(
        name=function.__name__,
        parameters=parameters,
        arguments=arguments,
        tensors=", ".join(tensors),
        requires_grad=" or ".join(_test(name, kinds[name]) for name in tensors) or "False",
    )
    code = compile(text, f"<opkiln: the call of {function.__name__}>", "exec")
    exec(code, names)  # noqa: S102 (the text is made of the names of a function's parameters)
    made: Callable[..., Any] = names[function.__name__]
    functools.update_wrapper(made, function)
    return made


def _signature(function: Callable[..., Any], names: dict[str, Any]) -> tuple[str, str]:
    """(parameters, the arguments of a call with them) in Python. Puts defaults into ``names``."""
    parameters, arguments = [], []
    named = False
    for each in inspect.signature(function).parameters.values():
        if each.kind == each.KEYWORD_ONLY and not named:
            named = True
            parameters.append("*")
        default = ""
        if each.default is not each.empty:
            default = f"=default_{each.name}_"
            names[f"default_{each.name}_"] = each.default
        parameters.append(each.name + default)
        arguments.append(f"{each.name}={each.name}" if named else each.name)
    return ", ".join(parameters), ", ".join(arguments)


def _test(name: str, kind: str) -> str:
    """An expression: whether this argument requires a gradient."""
    if kind == "Tensor":
        return f"{name}.requires_grad"
    return f"any_({name})"


def _any_requires_grad(*values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _any_requires_grad(*value):
            return True
    return False


def _refuse(name: str, written: tuple[str, ...]) -> None:
    raise RuntimeError(
        f"{name} writes to {', '.join(written)}, so it has no gradient. An argument requires one.\n"
        "hint: with torch.no_grad():"
    )
