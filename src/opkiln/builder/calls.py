"""The Python function that a decorated op is called by.

It is written for the op's own signature, as ``dataclasses`` writes ``__init__``: a call costs a
fraction of a microsecond more than torch's own object for the op. If no gradient is needed, it
calls an overload without one: autograd in Python takes longer than a small kernel.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from typing import Any

import torch
from torch.autograd import forward_ad

from opkiln.loading.register import at_trace_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opkiln.builder.entrance import Entrance

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
{choice}    if is_traced_():
        return no_grad_({arguments})
    return call_({arguments})
"""
_WITHOUT_GRADIENT = """\
def {name}({parameters}):
{choice}    if is_traced_():
        return overload_({arguments})
    return call_({arguments})
"""
_IN_PLACE = """\
def {name}({parameters}):
    if is_grad_enabled_() and any_({tensors}):
        refuse_()
{choice}    return overload_({arguments})
"""
# What is traced, or has shapes that are not those of its memory, chooses a variant when it is
# computed: a graph runs with other shapes, and a sharded tensor with its parts.
_CHOICE = """\
    if {plain} not (is_traced_() or count_modes_()):
        try:
            values = choose_({arguments})
            variant = variants_{values}
        except (KeyError, TypeError):  # not loaded yet, none, or a mistake: what follows tells
            pass
        else:
            return variant({arguments})
"""


def function_for(function: Callable[..., Any], entrance: Entrance) -> Callable[..., Any]:
    """The function to call in the place of ``function``. Its code is written with the first call,
    also with one that is traced. The author's function that chooses variants is its global
    ``choose_``."""
    names: dict[str, Any] = {"__builtins__": builtins, "choose_": _chooses_nothing}
    made = types.FunctionType(_first_call.__code__, names, function.__name__)
    functools.update_wrapper(made, function)

    def write(is_traced: bool) -> None:
        if "self_" in names:
            return  # by another thread, or by a trace
        called = types.FunctionType(_write(function, entrance, names), names, function.__name__)
        called.__defaults__, called.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        names["self_"] = called
        # torch.compile remembers the parameters of a function that it has traced.
        if not is_traced:
            made.__defaults__, made.__kwdefaults__ = called.__defaults__, called.__kwdefaults__
            made.__code__ = called.__code__

    names |= {"write_": at_trace_time(write), "is_traced_": torch.compiler.is_dynamo_compiling}
    return made


def _first_call(*args: Any, **kwargs: Any) -> Any:
    write_(is_traced_())  # type: ignore[name-defined] # noqa: F821 (globals of the function to call)
    return self_(*args, **kwargs)  # type: ignore[name-defined] # noqa: F821


def _write(
    function: Callable[..., Any], entrance: Entrance, names: dict[str, Any]
) -> types.CodeType:
    """The code of the function to call. Puts what it uses into ``names``."""
    variants = entrance if entrance.has_overloads else None
    overload, no_grad = entrance.overload(), entrance.overload(entrance.without_gradient)
    parsed = overload._schema.arguments
    kinds = {each.name: str(each.type) for each in parsed}
    written = [each.name for each in parsed if each.is_write]
    names |= {
        "overload_": overload,
        "no_grad_": no_grad,
        # What calling torch's object does, without its Python method: half a microsecond less.
        # torch.compile knows the object alone.
        "call_": getattr(no_grad, "_op", no_grad),
        "is_grad_enabled_": torch.is_grad_enabled,
        "forward_ad_": forward_ad,
        # An exported program may be trained, with arguments other than those it was traced with.
        "is_exporting_": torch.compiler.is_exporting,
        "any_": _any_requires_grad,
        "refuse_": functools.partial(_refuse, function.__name__, written),
        "variants_": {} if variants is None else variants.calls,
        "count_modes_": torch._C._len_torch_dispatch_stack,
        "plain_": frozenset((torch.Tensor, torch.nn.Parameter)),
        "are_plain_": _are_plain,
    }
    parameters, arguments = _signature(function)
    tensors = [name for name, kind in kinds.items() if "Tensor" in kind]
    # Whether each is no subclass of Tensor, and whether it requires a gradient.
    are_plain, tests = [], []
    for name in tensors:
        one = kinds[name] == "Tensor"
        are_plain.append(f"type({name}) in plain_ and " if one else f"are_plain_({name}) and ")
        tests.append(f"{name}.requires_grad" if one else f"any_({name})")
    choice = ""
    if variants is not None:
        values = "".join(f"[values[{name!r}]]" for name in variants.chosen_names)
        if variants.tuning is not None:
            names["tuned_for_"] = variants.tuning.exact
            values += f"[tuned_for_({arguments})]"
        choice = _CHOICE.format(plain="".join(are_plain), arguments=arguments, values=values)
    with_gradient = _WITH_GRADIENT if entrance.has_gradient else _WITHOUT_GRADIENT
    text = (_IN_PLACE if written else with_gradient).format(
        choice=choice,
        name=function.__name__,
        parameters=parameters,
        arguments=arguments,
        tensors=", ".join(tensors),
        requires_grad=" or ".join(tests) or "False",
    )
    code = compile(text, f"<opkiln: the call of {function.__name__}>", "exec")
    return next(each for each in code.co_consts if isinstance(each, types.CodeType))


def _chooses_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for the author's function as long as there is none."""


def _signature(function: Callable[..., Any]) -> tuple[str, str]:
    """(parameters, the arguments of a call with them) in Python."""
    parameters, arguments = [], []
    named = False
    for each in inspect.signature(function).parameters.values():
        if each.kind == each.KEYWORD_ONLY and not named:
            named = True
            parameters.append("*")
        default = "" if each.default is each.empty else "=None"  # which one, the function says
        parameters.append(each.name + default)
        arguments.append(f"{each.name}={each.name}" if named else each.name)
    return ", ".join(parameters), ", ".join(arguments)


def _are_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_are_plain, value))
    return value is None or type(value) in (torch.Tensor, torch.nn.Parameter)


def _any_requires_grad(*values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _any_requires_grad(*value):
            return True
    return False


def _refuse(name: str, written: Sequence[str]) -> None:
    raise RuntimeError(
        f"{name} writes to {', '.join(written)}, so it has no gradient. An argument requires one.\n"
        "hint: with torch.no_grad():"
    )
