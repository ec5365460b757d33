"""What the decorator makes of one function: its declaration, and the function to call. It needs
torch; ``library.py`` does without, so that the name ``opkiln.op`` can be looked up where there is
none.

The function to call is written for the op's own signature, as ``dataclasses`` writes ``__init__``:
a call costs a fraction of a microsecond more than torch's own object for the op. If no gradient is
needed, it calls an overload without one: autograd in Python takes longer than a small kernel.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from opkiln.base.model import texts
from opkiln.builder.entrance import Entrance
from opkiln.builder.variants import device_of
from opkiln.errors import LoadError, SpecError, told_briefly
from opkiln.loading.register import at_trace_time
from opkiln.loading.schema import require_returns_at_once, schema_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from opkiln.builder.base import OpBuilder
    from opkiln.builder.parameters import Value
    from opkiln.loading.explain import Explanation, Explanations

    _F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)


class DecoratedOp(Generic[_P, _R_co]):
    """What the decorator gives: the function to call, with these attributes."""

    __name__: str
    builder: type[OpBuilder]  # the class underneath: sources, flags, load(), is_compatible()
    reference: Callable[..., Any]  # the function that was decorated
    overload: Any  # torch's object for the op: torch.ops.<namespace>.<name>.default

    def __init__(
        self,
        function: Callable[_P, _R_co],
        mutates: str | Iterable[str],
        gradient: bool,
        builder: type[OpBuilder],
    ) -> None:
        name = function.__name__
        schema = schema_of(name, function, texts(f"op {name}: mutates=", mutates))
        entrance = self._entrance = Entrance(builder, schema, function, has_gradient=gradient)
        builder.declare(entrance)
        builder()._claim_name()
        entrance.tell_all()
        self.builder, self.reference, self.overload = builder, function, entrance.overload()
        made: Any = function_for(function, entrance)
        made.builder, made.reference, made.overload = builder, function, self.overload
        for each in (self.backward, self.fake, self.vmap, self.variant, self.tune_key,
                     self.check, self.load, self.reload, self.explain):  # fmt: skip
            setattr(made, each.__name__, each)
        self._function = made

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        result: _R_co = self._function(*args, **kwargs)
        return result

    def backward(self, function: _F) -> _F:
        """Give a gradient instead of that of the reference: ``function(*grads, *inputs)`` returns
        one gradient for each argument, None for those that have none. With a parameter ``output``
        it is also given the result."""
        entrance = self._entrance
        if not entrance.has_gradient:
            why = "it writes to its arguments" if entrance.mutates else "gradient=False says so"
            raise SpecError(
                f"op {self.builder.NAME} has no gradient: {why}",
                hint="torch.autograd.Function around it",
            )
        from opkiln.builder.gradient import takes_output

        require_returns_at_once(self.builder.NAME, function)
        results = self.overload._schema.returns
        if all(str(each.type) == "Tensor" for each in results):
            grads = [f"grad{number or ''}" for number in range(len(results))]
            self._require_fits(function, grads, ["output"] if takes_output(function) else [])
        entrance.find_gradient().replace(function)
        return self._declare("backward", function)

    def fake(self, function: _F) -> _F:
        """Give the shapes of the results instead of running the reference on fake tensors."""
        self._require_fits(function)
        return self._declare("fake", function)

    def vmap(self, function: _F) -> _F:
        """Give a batching rule, ``function(info, in_dims, *args)`` -> (result, out_dims)."""
        self._require_fits(function, ["info", "in_dims"])
        self._entrance.batch_with(function)
        return self._declare("vmap", function)

    def variant(self, function: _F) -> _F:
        """Give the function that chooses a variant: it takes the op's arguments and returns a value
        for each name of ``variants=``, as a dict; None if the reference is to run."""
        parameters = self.builder.PARAMETERS
        if not parameters or not parameters.chosen or parameters.by_dtype:
            raise SpecError(
                f"op {self.builder.NAME} has no variants to choose from",
                hint='@opkiln.op(..., variants={"HEAD": (64, 128)})',
            )
        self._require_fits(function)
        self._entrance.choose = self._function.__globals__["choose_"] = function
        return self._declare("variant", function)

    def tune_key(self, function: _F) -> _F:
        """Give the classes of shapes that ``tune=`` chooses for: the function takes the op's
        arguments and returns numbers or text, alone or in a tuple."""
        tuning = self._entrance.tuning
        if tuning is None:
            raise SpecError(
                f"op {self.builder.NAME} has nothing to tune",
                hint='@opkiln.op(..., tune={"BLOCK": (128, 256)})',
            )
        self._require_fits(function)
        tuning.author_key = function
        return self._declare("tune_key", function)

    @told_briefly
    def check(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        """Call native and reference and compare. Raises DifferenceError, and LoadError if there is
        no native version for these arguments."""
        entrance = self._entrance
        before = entrance.refused
        variant, why = entrance.find_variant(args, kwargs)
        if variant is None:
            raise LoadError(f"op {self.builder.NAME} has no variant for these arguments", why=why)
        variant.require_native(device_of(args, kwargs))
        result: _R_co = entrance.compare(variant.native or variant.overload, args, kwargs)
        if entrance.refused > before:
            why = next(reversed(entrance.reasons), "")
            raise LoadError(f"op {self.builder.NAME}: no kernel serves these arguments", why=why)
        return result

    @told_briefly
    def load(self, device: str = "cpu", **values: Value) -> bool:
        """Load the library for a device now; whether there is one. Of an op with variants, all that
        have these values; whether each has one. Raises OpkilnError."""
        loaded = [each.load(device) for each in self._entrance.matching(values)]
        return all(each is not None and each.artifact is not None for each in loaded)

    @told_briefly
    def reload(self) -> None:
        """Look at the sources again, and take in what changed. Raises OpkilnError."""
        for each in list(self._entrance.variants.values()):
            each.reload()

    def explain(self, device: str = "cpu", **values: Value) -> Explanation | Explanations:
        """Why the op is served as it is on this device; of an op with variants, each that has these
        values."""
        from opkiln.loading import explain as explaining

        found = [explaining.explain(each.builder_of(device).op())
                 for each in self._entrance.matching(values)]  # fmt: skip
        notes = self._entrance.notes
        if not self.builder.PARAMETERS:
            return found[0]._replace(notes=notes)
        return explaining.Explanations(self.builder.NAME, tuple(found), notes)

    def _declare(self, part: str, function: _F) -> _F:
        """Keep a function where whoever asks for the op's functions finds it."""
        self._entrance.parts[part] = function
        return function

    def _require_fits(
        self, function: Callable[..., Any], before: Sequence[str] = (), named: Sequence[str] = ()
    ) -> None:
        """Raise SpecError if a function cannot take the op's arguments, with these before them, or
        does not return at once."""
        require_returns_at_once(self.builder.NAME, function)
        arguments = self.overload._schema.arguments
        first = [*before, *(each.name for each in arguments if not each.kwarg_only)]
        rest = [*(each.name for each in arguments if each.kwarg_only), *named]
        try:
            inspect.signature(function).bind(*first, **dict.fromkeys(rest))
        except TypeError as error:
            parameters = ", ".join([*first, *(["*", *rest] if rest else [])])
            raise SpecError(
                f"op {self.builder.NAME}: {function.__name__} cannot take what it is called with",
                why=str(error),
                hint=f"def {function.__name__}({parameters}):",
            ) from None


_CALL = """\
def {name}({parameters}):
{first}{choice}    if is_traced_():
        return no_grad_({arguments})
    return call_({arguments})
"""
_WITH_GRADIENT = """\
    try:
        differentiate = (
            ({requires_grad}) and is_grad_enabled_()
        ) or forward_ad_._current_level >= 0 or is_exporting_()
    except AttributeError:  # not tensors: torch says so
        differentiate = True
    if differentiate:
        return overload_({arguments})
"""
_IN_PLACE = """\
    if is_grad_enabled_() and any_({tensors}):
        refuse_()
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
    # Whether each is a plain Tensor, and whether it requires a gradient.
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
    first = _IN_PLACE if written else _WITH_GRADIENT if entrance.has_gradient else ""
    first = first.format(
        arguments=arguments, tensors=", ".join(tensors), requires_grad=" or ".join(tests) or "False"
    )
    text = _CALL.format(
        name=function.__name__,
        parameters=parameters,
        first=first,
        choice=choice,
        arguments=arguments,
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
